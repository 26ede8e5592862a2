"""The run on one page: evaluate, play and learn at the same time, evaluate again."""

from __future__ import annotations

import asyncio

from unstable_lite.orchestrator.checkpoint import CheckpointSaver, sync_unchanged
from unstable_lite.orchestrator.evaluations import Evaluations
from unstable_lite.orchestrator.event_loop import unless_set
from unstable_lite.orchestrator.progress import Progress, timed
from unstable_lite.orchestrator.wiring import RunParts
from unstable_lite.types import INITIAL, uid_of


class TrainLoop:
    def __init__(self, parts: RunParts) -> None:
        self.parts = parts
        self.progress = Progress(parts)
        self.evaluations = Evaluations(parts, self.progress)
        self.saver = CheckpointSaver(parts, self.progress, self.evaluations)

    async def run(self) -> None:
        parts = self.parts
        async with asyncio.TaskGroup() as tasks:
            background = [tasks.create_task(supervisor.run()) for supervisor in parts.supervisors]
            pools = [policy.pool.run() for policy in parts.policies.values()]
            background += map(tasks.create_task, (parts.adapter_sync.run(), *pools, parts.health.run()))
            with parts.terminal.doing(lambda: "checking the adapter on every engine"):
                await self._start()
            await self.evaluations.evaluate_exactly()
            if parts.resume_from is None or self.evaluations.is_due:
                label = "before" if parts.resume_from is None else f"update {self.progress.updates}"
                await self.evaluations.evaluate(label)
            await (self._learn_in_turns() if parts.plan.config.run.schedule == "sync" else self._learn(tasks))
            saved, _ = await self.saver.save_newest(is_last=True)
            if parts.stop.is_set():
                parts.terminal.say(f"{f'{saved.name} is saved' if saved else 'nothing to save'}; ending the workers")
            else:
                await self.evaluations.evaluate("after")
            for task in background:
                task.cancel()

    async def _learn(self, tasks: asyncio.TaskGroup) -> None:
        """Learn while games are played."""
        parts, config = self.parts, self.parts.plan.config.run
        collecting = tasks.create_task(parts.collector.run(config.num_collection_workers, parts.plan.num_eval_workers))
        evaluating: list[asyncio.Task[None]] = []
        with self.progress.training():
            while not self.progress.is_over:
                if await self._update():
                    self.saver.begin_to_save_if_due(tasks)
                    if self.evaluations.is_due:
                        evaluation = self.evaluations.evaluate(f"update {self.progress.updates}")
                        evaluating.append(tasks.create_task(evaluation))
                await parts.health.pause_if_asked(self.saver.save_newest)
        collecting.cancel()
        for task in evaluating:
            await task

    async def _learn_in_turns(self) -> None:
        """Play a round, learn from it, and so on; nothing runs beside it, so a run repeats bit by bit."""
        parts, config = self.parts, self.parts.plan.config.run
        with self.progress.training():
            while not self.progress.is_over:
                for policy in parts.policies.values():
                    await policy.pool.settled()
                await parts.adapter_sync.retired()
                if not (policy := self.progress.next_to_learn).has_batch:
                    await parts.collector.play_round(config.num_collection_workers, *filter(None, [policy.name]))
                elif await self._update():
                    await self.saver.save_if_due()
                    if self.evaluations.is_due:
                        await self.evaluations.evaluate(f"update {self.progress.updates}")
                await parts.health.pause_if_asked(self.saver.save_newest)

    async def _update(self) -> bool:
        """Learn from one batch, sync the new adapter to every engine, and let games use it.

        Returns False if there was no update: the batch was skipped, or the run is to stop or to pause.
        """
        parts, policy, metrics = self.parts, self.progress.next_to_learn, dict[str, float]()
        version = policy.next_version
        with timed(metrics, "learner/wait_for_batch_s"):
            batch = await unless_set(policy.next_batch(), parts.stop, parts.health.asks_for_pause)
        if batch is None:
            return False
        policy.make_room(parts.policies.values())
        takes_turns = bool(parts.colocation.engines)
        async with parts.colocation.learner():
            updated = await policy.learner.update(batch, version, parts.store, saves_at_once=takes_turns)
        if updated.skipped is not None:
            self.progress.count_skipped(policy, updated.skipped)
            return False
        with timed(metrics, "learner/publish_s"):
            async with asyncio.TaskGroup() as tasks:
                if not takes_turns:
                    tasks.create_task(policy.learner.save_state(version, parts.store))
                metrics |= await parts.adapter_sync.sync(version, updated.digest)
            policy.admit(version)
            parts.collector.tell_new_checkpoint()
        await self.progress.report(policy, batch, updated, metrics)
        await parts.lineages.restart_if_due(policy)
        return True

    async def _start(self) -> None:
        """Check the base, the frozen players, and the adapter that training starts from, if there is one."""
        parts = self.parts
        canary = await parts.adapter_sync.canaries.check_base()
        for id, name, directory in parts.frozen:
            await parts.adapter_sync.load_frozen(id, name, directory)
        if parts.resume_from is not None:
            canary = await self.saver.resume(parts.resume_from)
        elif parts.plan.config.policies or parts.plan.config.lora.initial_lora_path is not None:
            for policy in parts.policies.values():
                canary = await sync_unchanged(parts, policy, version := policy.next_version)
                policy.pool.admit(uid_of(policy.name, INITIAL), version, update=0)
        parts.terminal.say(
            f"engine and learner agree about {parts.registry.current.uid}: mean |Δ log p| "
            f"{canary['canary/mismatch']:.5f} over {canary['canary/n']:.0f} tokens"
        )
