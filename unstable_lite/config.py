"""What a run is made of: TOML to frozen models, and every reason why it cannot run, found before it starts.

Defaults are the reference's (`runtime.py` `build()`), except where a comment gives the reason. Sections group the
keyword names of `build()`; they do not rename them.
"""

from __future__ import annotations

import copy
import difflib
import itertools
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from unstable_lite.errors import ConfigError
from unstable_lite.types import INHERITED, EvalEnvSpec, TrainEnvSpec

MAX_LEVELS = 16
"""Of tables and lists within each other."""


def _from_home(path: Path) -> Path:
    """A shell leaves `~` alone in `key=~/there`, and TOML always."""
    try:
        return path.expanduser()
    except RuntimeError as error:
        raise ValueError(f"{error} Write the whole path") from None


UserPath = Annotated[Path, AfterValidator(_from_home)]
LastingPath = Annotated[UserPath, AfterValidator(Path.absolute)]
"""A run that goes on looks there again, wherever it is called from."""


class Section(BaseModel):
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        protected_namespaces=(),
        allow_inf_nan=False,
        ser_json_inf_nan="constants",  # an option of a class of one's own may be inf, and workers get JSON
    )


class RunConfig(Section):
    mode: Literal["auto", "async", "share", "sleep", "sync"] = "auto"
    """When games are played, and when the learner learns.

    `async`: both at the same time, on devices of their own. `share`: the same on one device, whose memory is divided:
    `gpu_memory_utilization` of both sections. `sleep`: in turns on one device; while the learner learns, engines give
    its memory back and games wait, and each engine is tried before it plays again. `sync`: in turns, a round of games
    to its end and then an update, so that a run follows from its seed alone: on one machine with the embedded engine to
    the last bit. Slower, and for finding out what changed a result; there are no games of `num_eval_workers` then.
    `auto`: `share` where a device is both engine's and learner's, else `async`."""
    name: str | None = None
    """Name of the run directory, without slashes; default: `unstable-lite-<model>-<envs>`."""
    learning_steps: int = Field(200, ge=1)
    """Updates of the learner, and so adapter versions."""
    num_collection_workers: int = Field(256, ge=1)
    """Training games in flight, at most; in mode `sync`, those of one round. There are fewer where more would become
    older than `buffer.max_staleness` allows; `check` says how many, the metric `run/games_in_flight` how many are."""
    num_eval_workers: int = Field(16, ge=0)
    """Evaluation games in flight beside them; 0 evaluates only by `eval_games`.

    eval.jsonl has their results by checkpoint, labelled "concurrent". Those in flight when training ends are given up,
    so the last checkpoints' are of shorter games.
    """
    eval_games: int = Field(0, ge=0)
    """Games per eval env and evaluation, balanced over the seats, before the first and after the last update."""
    max_eval_games_per_ckpt: int | None = Field(None, ge=1)
    """At most so many games of one checkpoint by `num_eval_workers`; then they wait for the next one."""
    filter_opponent_invalid: bool = False
    """Do not train on the steps of a player whose game was ended by another player's invalid move."""
    eval_every: int | None = Field(None, ge=1)
    """Also evaluate by `eval_games` after every so many updates, while training goes on."""
    seed: int = Field(0, ge=0)
    """What envs, samplers and sampling draw from; training and evaluation envs have seeds of their own. Outside mode
    `sync`, an engine that starts again, or with `--resume`, draws from chance: not once more what it drew before."""
    output_dir: UserPath = Path("outputs")
    """Where run directories are made: `<output_dir>/<date>/<time>-<name>/`."""
    checkpoint_every: int = Field(10, ge=1)
    """Save adapter, optimiser and league to disk every so many updates (the last one always)."""
    game_timeout_s: float = Field(1800.0, gt=0)
    """Wall-clock cap of one game, without the learner's turns of mode `sleep`; past it the game is void."""
    group_size: int = Field(1, ge=1)
    """Every training game is played so often, with the same env, seed, seats and opponents: see
    `rewards.group_baseline`."""
    max_action_chars: int = Field(2000, ge=1)
    """Longer actions are cut before they reach the env."""
    env_timeout_s: float = Field(5.0, gt=0)
    """One call into an env that takes longer is broken off, and its game void."""
    loop_stall_s: float = Field(30.0, gt=0)
    """The event loop, which all games share, has stood still for so long (a reward transform without end, a call that
    blocks): alarm, with the stacks in logs/orchestrator.log. After ten times as long the process ends itself."""
    max_restarts: int = Field(5, ge=0)
    """Deaths of one worker within an hour that the run survives by starting it again."""
    restart_backoff_s: float = Field(1.0, ge=0)
    """Before the first of these starts; twice as long before each one after it."""
    max_void_games: int = Field(20, ge=1)
    """So many void games of one env in a row end the run with the last one's error."""


class EngineConfig(Section):
    kind: str = "auto"
    """`vllm`, `transformers`, `vllm-server`, `scripted`, `auto` (vLLM on GPUs where it is usable, else
    transformers), or `module:Class`."""
    devices: tuple[int | Literal["cpu"], ...] | Literal["auto"] = "auto"
    """One worker for each: CUDA device numbers, or "cpu". `auto`: every GPU but the learner's; one alone is shared;
    without any, one worker on the CPU."""
    temperature: float = Field(0.6, gt=0)
    """Of sampling; the learner divides its logits by the same. Training needs 0.01 at least."""
    top_p: float = Field(1.0, gt=0, le=1)
    """The reference hides 0.95 here; below 1 the learner's importance ratio has no meaning."""
    allow_top_p: bool = False
    """Accept `top_p` below 1 although importance weights are then wrong."""
    max_generation_len: int = Field(4096, ge=1)
    """Largest number of tokens of one completion."""
    max_model_len: int = Field(8192, ge=2)
    """Prompt and completion together; no longer than the model's own limit, which with LongRoPE is that of its short
    factors (`original_max_position_embeddings`): no two libraries rotate alike past it."""
    max_parallel_seq: int = Field(128, ge=1)
    """Requests that one worker runs at once."""
    max_loras: int = Field(8, ge=1)
    """Adapter versions that are loaded at once: current, in games in flight, opponents."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Of the base model; `auto`: 16 bits on GPUs, on the CPU what is faster for the model's width."""
    threads: int | None = Field(None, ge=1)
    """CPU threads of one worker. Default: 1 on a GPU, else the cores divided among all workers. For a small model
    another "cpu" in `devices` makes more of a core than another thread; see docs/gpus.md."""
    gpu_memory_utilization: float | None = Field(None, gt=0, le=1)
    """Part of a GPU's memory that a worker takes. Default: 0.9 divided by the number of engines
    there; 0.5 if the learner shares the GPU, 0.7 if they take turns."""
    kv_cache_gb: float = Field(1.0, gt=0)
    """Memory for the KV cache where the engine runs on the CPU."""
    enforce_eager: bool | None = None
    """vLLM only: no compilation, no CUDA graphs. Default: eager on the CPU, graphs on a GPU."""
    start_timeout_s: float = Field(600.0, gt=0)
    """For a worker to load its model."""
    request_timeout_s: float = Field(600.0, gt=0)
    """A request without a reply after so long fails."""
    stall_timeout_s: float = Field(300.0, gt=0)
    """A worker that owes replies and says nothing for so long is killed and started again."""
    urls: tuple[str, ...] = ()
    """`vllm-server` only: where vLLM's servers are, one worker for each; see docs/cluster.md. If they ask for a key, it
    comes from the environment variable VLLM_API_KEY."""
    adapter_folder: UserPath | None = None
    """`vllm-server` only: a folder that this machine and every server see under the same absolute path."""
    adapter_receivers: tuple[str, ...] = ()
    """`vllm-server` only, where no folder is shared: the side-car beside each of `urls`, in the same order, that takes
    adapters by HTTP. Its secret comes from the environment variable ADAPTER_RECEIVER_API_KEY."""
    replies: tuple[str, ...] = ("\\boxed{[0]}",)
    """`scripted` only: the completions it draws from."""

    @property
    def gpu_share(self) -> float:
        """`gpu_memory_utilization`, or its default for an engine that has the GPU to itself."""
        return self.gpu_memory_utilization or 0.9


class RemoteConfig(Section):
    """Workers on other machines, as engines beside those of `engine.devices`: `unstable-lite worker`."""

    workers: int = Field(0, ge=0)
    """Places for them. They come and go while the run goes on; it starts as soon as one engine, here or there, is up.
    Those that come when all places are taken wait for one."""
    bind: str = "tcp://0.0.0.0:7355"
    """Where they connect to; nothing is bound without keys."""
    keys: UserPath = Path("keys")
    """A directory that `unstable-lite keys` made: who has a key that is admitted there may come in, nobody else."""
    silence_s: float = Field(15.0, ge=1, le=600)
    """A link over which nothing has come for so long is given up by both sides; what the worker owes is asked of
    others, and it comes again when it can. A slow link must carry what is under way to one worker within this time."""


class LearnerConfig(Section):
    devices: tuple[int | Literal["cpu"], ...] | Literal["auto"] = "auto"
    """One rank for each: CUDA device numbers, or "cpu" as often as wanted. The ranks divide every batch among them,
    by tokens, and make the update that one alone would make. `auto`: the first GPU that
    `engine.devices` leaves, or the CPU where there is none."""
    remote_ranks: int = Field(0, ge=0)
    """Further ranks that join from other machines, by `torchrun … -m unstable_lite.learners.join HOST:PORT`."""
    rendezvous: str | None = None
    """`HOST:PORT` of this machine, where they join. What goes through it is neither encrypted nor checked, as with
    torch.distributed everywhere: for a network that nobody else can reach."""
    shard_base: bool = False
    """Each rank holds its part of the frozen base and is lent the rest layer by layer: for a base that does not fit one
    device. Slower; needs torch 2.7. Memory that runs out then ends the run: lower `max_tokens_per_micro_batch`."""
    batch_size: int = Field(384, ge=1)
    """Steps of one update; where it learns from whole trajectories (`a2c`, `ppo`), at least so many."""
    mini_batch_size: int | None = Field(None, ge=1)
    """Sequences of one micro-batch at most; the gradient is the same whatever it is. Reference: 1."""
    max_tokens_per_micro_batch: int = Field(16384, ge=1)
    """Micro-batches are filled with sequences of similar length up to so many tokens, padding included."""
    learning_rate: float = Field(1e-5, gt=0)
    """Of the adapter, AdamW."""
    learning_rate_schedule: Literal["constant", "linear"] = "constant"
    """`linear`: the learning rates, the critic's too, fall by the same amount after every update and would be 0 after
    `run.learning_steps`. A resume with more of these raises them to what the new number gives."""
    optimizer: Literal["adamw", "adamw8bit"] = "adamw"
    """`adamw8bit` keeps the moments of large matrices in 8 bits; it needs bitsandbytes."""
    weight_decay: float = Field(0.01, ge=0)
    """AdamW's."""
    gradient_clipping: float = Field(0.2, gt=0)
    """Largest L2 norm of the gradient; `learner/grad_clipped` is the share of steps that it limits."""
    activation_checkpointing: bool = True
    """Recompute a layer's activations in the backward pass; this or `gradient_checkpointing` = false turns it off."""
    gradient_checkpointing: bool = True
    """Another name of `activation_checkpointing`, as in the reference."""
    use_trainer_cache: bool = False
    """Keep the model's KV cache on in training forwards. Reference option; only costs memory."""
    max_train_len: int | None = Field(None, ge=1)
    """Most tokens of prompt and completion together. Longer steps are not trained on: `learner/pct_truncated`."""
    importance_weight_cap: float = Field(2.0, gt=0)
    """Truncation of π/μ per token."""
    kl_coefficient: float = Field(0.0, ge=0)
    """Price of one nat of KL(policy ‖ reference) per token, in units of the advantage; 0: not computed."""
    entropy_coefficient: float = Field(0.0, ge=0)
    """Bonus per nat of token entropy, in units of the advantage. A value above 0 keeps the policy exploring."""
    kl_reference: Literal["initial", "base"] = "initial"
    """What `kl_coefficient` keeps the policy near: the adapter at `lora.initial_lora_path` if there is one, or the base
    model without an adapter."""
    critic_learning_rate: float = Field(5e-5, gt=0)
    """Of the critic's adapter and head."""
    critic_warmup_updates: int = Field(0, ge=0)
    """So many first updates train the critic alone; each still publishes the policy, unchanged, as a new version."""
    gamma: float = Field(1.0, ge=0, le=1)
    """Discount per turn of the player's own, for algorithms with a critic."""
    gae_lambda: float = Field(1.0, ge=0, le=1)
    """1: what really came after; 0: what the critic expects after one turn."""
    normalize_adv: bool = True
    """Advantages of a batch get mean 0 and standard deviation 1, for algorithms with a critic."""
    infer_mini_batch_size: int = Field(16, ge=1)
    """Prompts at most that the critic reads at once where no gradient is needed."""
    ppo_epochs: int = Field(4, ge=1)
    """Passes over one batch of `ppo` and `grpo`; an update makes one adapter version, however many there are."""
    ppo_minibatches: int = Field(1, ge=1)
    """Optimiser steps of one such pass."""
    clip_range: float = Field(0.2, gt=0)
    """`ppo` and `grpo`: how far from 1 the ratio to the update's first policy may go before it gains no more."""
    options: dict[str, Any] = {}
    """Keyword arguments of an algorithm of your own, as its `__init__` names them."""
    logits_chunk_tokens: int = Field(128, ge=1)
    """Completion tokens whose logits exist at once: 10 bytes each for every entry of the vocabulary."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Of the frozen base; adapters and optimiser are always float32."""
    gpu_memory_utilization: float | None = Field(None, gt=0, le=1)
    """Part of a GPU's memory that the learner takes at most; past it, micro-batches become smaller. Default: where an
    engine shares the GPU at the same time, what it leaves less 0.05; else no bound."""
    threads: int | None = Field(None, ge=1)
    """CPU threads. Default: 4 on a GPU, else the cores divided among all workers."""
    start_timeout_s: float = Field(600.0, gt=0)
    """For it to load its model."""
    update_timeout_s: float = Field(3600.0, gt=0)
    """An update that takes longer counts as stuck."""
    canary_tolerance: float = Field(0.2, gt=0)
    """Mean |Δ log p| between engine and learner that still counts as rounding when it is measured on the base at the
    start; a run with more does not start. Afterwards adapters are judged against what was measured."""

    @property
    def is_checkpointed(self) -> bool:
        """Whether activations are recomputed."""
        return self.activation_checkpointing and self.gradient_checkpointing


class LoraConfig(Section):
    lora_rank: int = Field(32, ge=1, le=512)
    """Rank r of the adapter."""
    lora_alpha: float = Field(32, gt=0)
    """The adapter's output is scaled by lora_alpha / lora_rank."""
    lora_dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout probability on the adapter's input, for `sft` and custom algorithms; built-in algorithms refuse it."""
    target_modules: tuple[str, ...] = Field(
        ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"), min_length=1
    )
    """Linear layers that get an adapter."""
    initial_lora_path: LastingPath | None = None
    """A PEFT directory to start from."""
    initial_critic_path: LastingPath | None = None
    """`critic/` of a checkpoint, for an algorithm with a critic to start from."""


EMBEDDINGS = ("lm_head", "embed_tokens")
"""As nearly every model calls its head and its token embedding."""


def no_adapter_at(target: str) -> str:
    """Why the head and the token embedding cannot be in `lora.target_modules`."""
    return (
        f"lora.target_modules: {target!r} is the model's head or token embedding, which the learner does not train and "
        "engines do not adapt; name layers between the two"
    )


class BufferConfig(Section):
    kind: Literal["auto", "steps", "episodes"] = "auto"
    """What a batch is made of; `auto`: what the algorithm wants, steps for a `module:Class`."""
    buffer_size: int | None = Field(None, ge=1)
    """Steps that wait for the learner before no new game starts; default 2 × batch_size."""
    max_staleness: int = Field(8, ge=0)
    """Updates since a step was sampled. So many games are in flight that their steps are trained on by then; steps that
    are older all the same are dropped and counted."""
    batch_delay_buffer: float = Field(1.0, ge=1)
    """A batch is drawn once so many times its steps wait. Reference: 1.5, which mixes games more and trains later."""


class Transformation(Section):
    name: str
    model_config = ConfigDict(frozen=True, extra="allow")


class RewardConfig(Section):
    """Lists of transforms, applied in order: a name, or a table of `name` and its keyword arguments.

    What is None depends on the algorithm (docs/rewards.md); `check` shows what it comes to.
    """

    final_reward_transformation: tuple[Transformation | str, ...] | None = None
    """`(reward, pid, env_id)` to a reward, once for each trained player of a game."""
    step_reward_transformation: tuple[Transformation | str, ...] | None = None
    """`(player_traj, step_index, reward)` to a reward, once for each of its turns."""
    sampling_reward_transformation: tuple[Transformation | str, ...] | None = None
    """`(steps)` to steps, once a batch."""

    group_baseline: Literal["grpo", "rloo"] | None = None
    """What a player's reward is compared with, among the games of its group (`run.group_size`): `grpo` takes off the
    group's mean and divides by its standard deviation, `rloo` takes off the mean of the others. Default: what
    `algorithm` is called, if it is one of the two. It is a baseline: role advantages and batch normalisation are not to
    come on top of it."""


class LeagueConfig(Section):
    env_sampling_strategy: str | dict[str, Any] = "random"
    """`random`, `weighted`, `round-robin`, `learning-progress`, or `module:Class`; with options as a table of one
    name: `{ weighted = { weights = { "Nim-v0-train" = 2, "KuhnPoker-v0-train" = 1 } } }`."""
    opponent_sampling_strategy: str | dict[str, Any] = "none"
    """`none`, `mirror`, `fixed`, `lagged`, `uniform`, `random`, `match-quality`, `ts-dist`, `ts-dist-biased`, `pfsp`,
    `module:Class`, or a mixture: `{ mirror = 0.6, fixed = 0.1, pfsp = { weight = 0.3, weighting = "even" } }`.
    What each draws, and its options: docs/league.md. From `random` on they draw fixed opponents too.
    """
    shares_by: Literal["games", "steps"] = "games"
    """What the shares of envs and opponents are shares of. `steps`: of the steps that are trained on, whatever samplers
    draw; a game that brings more steps (a long one, or one against itself, where both seats are trained) is played less
    often in proportion."""
    fixed_opponents: tuple[str, ...] = ("google/gemini-2.0-flash-lite-001",)
    """`scripted:random` and other scripted players (docs/opponents.md), a class of your own as `module:Class`, or else
    a model behind the endpoint of section `opponents`."""
    opponent_lag: tuple[int, int] = (1, 7)
    """Updates back, at least and at most, of the checkpoints that may be opponents."""
    max_active_checkpoints: int | None = Field(None, ge=1)
    """Checkpoints that can be played at once, the current one included; each needs an adapter slot. Default: 1 where
    the strategy draws no older ones; all that `opponent_lag` allows for `lagged`; else also no more than fit."""
    active_checkpoints_by: Literal["recency", "match-quality", "nearest-rating"] = "recency"
    """Which ones, where there are more: the newest, those of the best TrueSkill match quality, or of the nearest μ."""
    rotate_checkpoints_every: int = Field(1, ge=1)
    """Updates from one look at who should come back to the next."""
    keep_checkpoints: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """Updates whose adapters stay on disk for ever, in `adapters/` of the run directory, and may be opponents at any
    age. Others stay while they may be opponents."""
    keep_every: int | None = Field(None, ge=1)
    """The same for every k-th update."""
    trueskill_beta: float = Field(4.0, gt=0)
    """How much chance there is in a game: the distance in skill that wins 76 % of them."""


class OpponentsConfig(Section):
    """Opponents behind an OpenAI-compatible endpoint. The key comes from the environment: OPENROUTER_API_KEY for
    OpenRouter, OPENAI_API_KEY for any other; a server on this machine needs none.
    """

    base_url: str | None = None
    """Default: the environment's OPENAI_BASE_URL, else OpenRouter."""
    timeout_s: float = Field(120.0, gt=0)
    """Of one attempt."""
    max_retries: int = Field(4, ge=0)
    """Further attempts, with growing waits, after an error that may pass: no connection, 408, 409, 429, 5xx."""
    max_concurrent_requests: int = Field(32, ge=1)
    """In flight at once, of all games; more wait."""
    temperature: float | None = Field(None, ge=0)
    """Default: the endpoint's."""
    max_tokens: int | None = Field(None, ge=1)
    """Of one answer. Default: the endpoint's."""
    max_requests: int | None = Field(None, ge=1)
    """A limit of spending, as the next two: once reached, games against these opponents are over (those in flight are
    void), and the run goes on with what else there is to play; it ends if there is nothing."""
    max_total_tokens: int | None = Field(None, ge=1)
    """Of prompts and answers."""
    max_usd: float | None = Field(None, gt=0)
    """By the two prices below."""
    usd_per_million_prompt_tokens: float = Field(0.0, ge=0)
    """For `max_usd`."""
    usd_per_million_completion_tokens: float = Field(0.0, ge=0)
    """For `max_usd`."""
    pause_s: float = Field(10.0, gt=0)
    """How long a model that fails again and again is first left alone; doubles until it answers."""
    max_pause_s: float = Field(600.0, gt=0)
    """The longest such pause."""
    outage_s: float = Field(600.0, gt=0)
    """An evaluation by `run.eval_games` waits so long for a model that is down; then its games are void."""


class TemplateConfig(Section):
    """A prompt template of your own, known by its name wherever `prompt_template` is asked for.

    `{observation}` stands once in `user`; `{game}`, anywhere, becomes a sentence that names the kind of game for the
    number of players. Other braces, as in `\\boxed{}`, stay as they are.
    """

    user: str
    """The user's message, with `{observation}` in it."""
    system: str = ""
    """What stands before it."""
    assistant: str = ""
    """How the answer begins, for example `<think>`."""
    chat: bool = False
    """The tokenizer's own chat template puts its markup around system and user; else the three texts are the prompt,
    one after the other, as they stand."""
    thinking: bool = True
    """With `chat`: `enable_thinking` of the tokenizer's chat template."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Strings that end the answer, besides the model's end tokens and, with `chat`, what closes a turn."""
    zero_sum: bool = False
    """`{game}` calls games of several players zero-sum."""


class TrackerConfig(Section):
    wandb_project: str | None = None
    """Also log to this project of Weights & Biases (extra `wandb`), under the same names."""
    keep_games: Literal["all", "eval", "none"] = "all"
    """Which transcripts go to games.jsonl."""
    keep_tokens: bool = False
    """Keep each turn's sampled token ids with their log-probabilities in games.jsonl; the learner's in train_data/."""
    keep_train_data: bool = True
    """Keep what each update trained on, in train_data/."""
    transcript_every: int = Field(10, ge=0)
    """Updates from one game to the next that TensorBoard and W&B show as text; 0: none."""
    max_part_mb: float = Field(64.0, gt=0)
    """games.jsonl goes on in a new file at so many MB; the full one is compressed."""


class AlarmConfig(Section):
    """One guard of learning."""

    threshold: float
    """The alarm is on while its figure is beyond it: over it, and for `entropy` under it."""
    action: Literal["off", "warn", "pause", "stop"] = "warn"
    """`warn`: say so. `pause`: also save a checkpoint, play and learn no more, and wait until the file PAUSED in the
    run directory is deleted. `stop`: also finish the update, save a checkpoint, and end with an error."""
    updates: int = Field(1, ge=1)
    """So many times in a row the figure has to be there before the alarm is on, and gone before it is off."""


class AlarmsConfig(Section):
    """What learning gone wrong looks like. A table changes what it names: `entropy = { action = "stop" }`.

    What each alarm means, and what to try: docs/collapse.md, and the alarm itself.
    """

    mismatch: AlarmConfig = AlarmConfig(threshold=0.1)
    """Mean |Δ log p| between engine and learner over a sample of each update's steps."""
    clipping: AlarmConfig = AlarmConfig(threshold=0.2, updates=3)
    """Share of an update's tokens whose importance weight is cut at `learner.importance_weight_cap`."""
    staleness: AlarmConfig = AlarmConfig(threshold=6.0, updates=5)
    """Mean age of an update's tokens, in updates; `buffer.max_staleness` bounds the oldest."""
    dropped: AlarmConfig = AlarmConfig(threshold=0.05, updates=3)
    """Share of the steps that left the buffer for an update that were dropped as older than `buffer.max_staleness`."""
    entropy: AlarmConfig = AlarmConfig(threshold=0.02, updates=3)
    """Mean entropy of the policy at an update's tokens, in nats; under it."""
    high_entropy: AlarmConfig = AlarmConfig(threshold=3.0, updates=3)
    """The same entropy less that of the run's first update; over it."""
    repetition: AlarmConfig = AlarmConfig(threshold=0.5, updates=3)
    """Share of 4-grams of tokens that stood in the same completion before."""
    identical: AlarmConfig = AlarmConfig(threshold=0.95, updates=5)
    """Share of an update's steps whose completion is the commonest one."""
    zero_advantage: AlarmConfig = AlarmConfig(threshold=0.95, updates=5)
    """Share of an update's steps whose advantage is 0."""
    invalid_moves: AlarmConfig = AlarmConfig(threshold=0.9, updates=5)
    """Share of an env's newest training games that the policy ended by an invalid move of its own."""
    collapse: AlarmConfig = AlarmConfig(threshold=0.0)
    """How far the interval of the newest evaluation lies under that of the best one before it, in points (win 1, draw
    1/2), or in mean reward if nobody can win."""
    decline: AlarmConfig = AlarmConfig(threshold=0.1)
    """The same for the share of points of the newest games of training and of `run.num_eval_workers` against a fixed
    opponent, and for the share of training games without an own invalid move."""
    starved: AlarmConfig = AlarmConfig(threshold=900.0)
    """Seconds in which training games ended, none of them brought the learner a step, and no batch waited; or in which
    games of one env ended, and updates were made without a step of it."""
    skipped: AlarmConfig = AlarmConfig(threshold=9, action="stop")
    """Batches in a row that were skipped, because the loss was not finite or no step of them could be trained on."""

    @model_validator(mode="before")
    @classmethod
    def _keep_what_is_not_given(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        defaults = {name: field.default.model_dump() for name, field in cls.model_fields.items()}
        return {
            name: {**defaults[name], **alarm} if name in defaults and isinstance(alarm, dict) else alarm
            for name, alarm in given.items()
        }


class SftConfig(Section):
    """`unstable-lite sft`: an adapter that imitates, for `lora.initial_lora_path` of a run."""

    players: tuple[str, ...] = ()
    """Who plays the `train_envs`: `scripted:NAME`, a model at an OpenAI-compatible endpoint, `base`, or
    `adapter:DIRECTORY`. In an env's g-th game seat i goes to number (g + i), modulo how many they are; a name may stand
    here twice."""
    imitate: tuple[str, ...] | None = None
    """Keep the turns of these players only; default: of all."""
    filter: tuple[Literal["winners", "valid"], ...] = ("winners", "valid")
    """`winners`: turns of who won the game (alone: with a reward above 0). `valid`: turns whose answer has the form
    that was asked for and did not end the game as an invalid move."""
    pairs: int = Field(750, ge=1)
    """Turns to keep."""
    max_games: int = Field(10_000, ge=1)
    """Played at most, should the filter leave too little."""
    data: UserPath | None = None
    """Train on all pairs of this JSONL file, and play nothing. Each line has an `observation`, for which the template
    makes the prompt, or a `prompt`; and an `action`, which is written as the template asks for it, or a `completion`.
    `env_id` says which of `train_envs` it is of (else: the first)."""
    output: UserPath = Path("warm_start")
    """A directory for the pairs (`pairs.jsonl`), the adapter, and how it was made (`sft.json`)."""
    epochs: int = Field(3, ge=1)
    """Passes over the pairs."""
    learning_rate: float = Field(1e-4, gt=0)
    """Of the adapter, AdamW."""
    batch_size: int = Field(32, ge=1)
    """Pairs of one optimiser step."""
    holdout: float = Field(0.1, ge=0, lt=1)
    """Share of the pairs that is only measured; no prompt is both trained on and held out."""


class Config(Section):
    model_name: str = "builtin:tiny"
    """`builtin:tiny`, a model hub's name, a local directory with weights in safetensors, or a GGUF file (`*.gguf`),
    which is converted once."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model, in engines and learner. Read it first: it can do what you can."""
    algorithm: str = "reinforce"
    """`reinforce`, `a2c`, `ppo`, `grpo`, `rloo`, or a class of your own as `module:Class`."""
    run: RunConfig = RunConfig()
    engine: EngineConfig = EngineConfig()
    remote: RemoteConfig = RemoteConfig()
    learner: LearnerConfig = LearnerConfig()
    lora: LoraConfig = LoraConfig()
    buffer: BufferConfig = BufferConfig()
    rewards: RewardConfig = RewardConfig()
    league: LeagueConfig = LeagueConfig()
    opponents: OpponentsConfig = OpponentsConfig()
    tracker: TrackerConfig = TrackerConfig()
    alarms: AlarmsConfig = AlarmsConfig()
    templates: dict[str, TemplateConfig] = {}
    sft: SftConfig = SftConfig()
    train_envs: tuple[TrainEnvSpec, ...] = Field(min_length=1)
    eval_envs: tuple[EvalEnvSpec, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _inherit_from_training(cls, given: Any) -> Any:
        """Fill in what an eval env leaves out and the training env of the same id has; see `INHERITED`.

        An `EvalEnvSpec` leaves out what it has at its default.
        """
        if not isinstance(given, dict):
            return given
        train, evaluated = given.get("train_envs"), given.get("eval_envs")
        if not isinstance(train, list | tuple) or not isinstance(evaluated, list | tuple):
            return given
        trained = {
            str(env.get("env_id")): {key: env[key] for key in INHERITED if key in env} for env in map(_given, train)
        }
        return {
            **given,
            "eval_envs": [
                trained[env_id] | own if (env_id := str((own := _given(env)).get("env_id"))) in trained else env
                for env in evaluated
            ],
        }

    @property
    def buffer_size(self) -> int:
        return self.buffer.buffer_size or 2 * self.learner.batch_size

    @property
    def group_baseline(self) -> Literal["grpo", "rloo"] | None:
        of_algorithm: dict[str, Literal["grpo", "rloo"]] = {"grpo": "grpo", "rloo": "rloo"}
        return self.rewards.group_baseline or of_algorithm.get(self.algorithm)


def _given(env: Any) -> dict[str, Any]:
    """Return what an env's entry says; of a spec, what is not at its default."""
    if isinstance(env, TrainEnvSpec | EvalEnvSpec):
        return {f.name: value for f in fields(env) if (value := getattr(env, f.name)) != f.default}
    return env if isinstance(env, dict) else {}


def read_config(path: Path, overrides: tuple[str, ...] = ()) -> tuple[Config | None, list[str]]:
    """Read a TOML file and apply `section.key=value` overrides; see `parse_config`.

    Raises ConfigError if there is no TOML to read.
    """
    try:
        raw = parse_toml(path.read_bytes(), str(path))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    for override in overrides:
        _apply_override(raw, override)
    try:
        config, problems = parse_config(raw)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    return config, [f"{path}: {problem}" for problem in problems]


def parse_toml(content: bytes, where: str) -> dict[str, Any]:
    """Raises ConfigError for what is no TOML."""
    try:
        return tomllib.loads(content.decode("utf-8-sig"))  # some editors begin a file with a mark
    except RecursionError as error:
        raise ConfigError(f"{where}: nested too deep") from error
    except ValueError as error:  # no TOML, no text, or a number of thousands of digits
        raise ConfigError(f"{where}: not TOML: {error}") from error


def parse_config(raw: dict[str, Any]) -> tuple[Config | None, list[str]]:
    """The config and its problems of form.

    Where there are problems, the config is what is left without the offending keys (or None), so that the caller can
    look for problems of meaning in the rest and report all of them together. Raises ConfigError for what is no config
    at all: nested without end, or with numbers over 64 bits.
    """
    _check_bounds(raw)
    problems: list[str] = []
    while True:
        try:
            return Config.model_validate(raw), problems
        except ValidationError as error:
            problems = problems or _problems(error)
            smaller = _without_offenders(raw, error)
            if smaller == raw:
                return None, problems
            raw = smaller


def _check_bounds(raw: dict[str, Any]) -> None:
    level: list[tuple[str, Any]] = list(raw.items())
    for _ in range(MAX_LEVELS):
        for key, value in level:
            if isinstance(value, int) and value.bit_length() > 63:
                raise ConfigError(f"{key} is an integer of {value.bit_length()} bits; 63 and a sign are the most")
        tables = [value.items() for _, value in level if isinstance(value, dict)]
        lists = [((key, item) for item in value) for key, value in level if isinstance(value, list | tuple)]
        level = list(itertools.chain(*tables, *lists))
    if level:
        raise ConfigError(f"{level[0][0]} stands within {MAX_LEVELS} tables or lists; no key of ours does")


def _without_offenders(raw: dict[str, Any], error: ValidationError) -> dict[str, Any]:
    """`raw` without the keys that `error` names; an env entry goes as a whole."""
    raw = copy.deepcopy(raw)
    offenders: set[tuple[Any, ...]] = {tuple(detail["loc"][:2]) for detail in error.errors()}
    last_entry_first = sorted(offenders, key=lambda loc: [f"{part:>9}" for part in loc], reverse=True)
    for section, *rest in last_entry_first:
        table = raw.get(section)
        is_inside = rest and (rest[0] in table if isinstance(table, dict) else isinstance(table, list))
        if is_inside and table is not None:
            del table[rest[0]]
        else:
            raw.pop(section, None)
    return raw


def _apply_override(raw: dict[str, Any], override: str) -> None:
    """`learner.batch_size=64`: the value is TOML; what is not TOML is taken as a string."""
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"override {override!r}: write it as section.key=value")
    try:
        value = parse_toml(f"value = {text}".encode(errors="replace"), override)["value"]
    except ConfigError:
        value = text
    *sections, name = key.strip().split(".")
    table = raw
    for section in sections:
        table = table.setdefault(section, {})
        if isinstance(table, list):
            raise ConfigError(f"override {override!r}: {section} is a list; change it in the file")
        if not isinstance(table, dict):
            raise ConfigError(f"override {override!r}: {section} is not a section")
    table[name] = value


def _problems(error: ValidationError) -> list[str]:
    problems = []
    for detail in error.errors(include_url=False):
        if detail["loc"][-1] == "str" and isinstance(detail["input"], dict):
            continue  # a table that is wrong as a table need not also be refused as a string
        location = [part for part in detail["loc"] if part != "Transformation" and "[" not in str(part)]
        key = ".".join(map(str, location))
        if detail["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
            close = difflib.get_close_matches(str(location[-1]), _known_keys(location[:-1]), n=1, cutoff=0.5)
            hint = f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(_known_keys(location[:-1]))}"
            problems.append(f"unknown key {key!r}{hint}")
        elif detail["type"] in ("missing", "missing_argument"):
            problems.append(f"{key!r} is missing")
        elif detail["type"] == "too_short" and detail["loc"] == ("train_envs",) and detail["input"]:
            continue  # its entries are there, and refused for reasons of their own
        else:
            problems.append(f"{key} = {detail['input']!r}: {detail['msg']}")
    return problems


def _known_keys(location: list[Any]) -> list[str]:
    """The keys that exist where the unknown one stands."""
    if not location:
        return list(Config.model_fields)
    by_section: dict[Any, list[str]] = {
        "train_envs": list(TrainEnvSpec.__dataclass_fields__),
        "eval_envs": list(EvalEnvSpec.__dataclass_fields__),
        "templates": list(TemplateConfig.model_fields),
    }
    for name, info in Config.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, Section):
            by_section[name] = list(info.annotation.model_fields)
    if location[0] == "alarms" and len(location) > 1:
        return list(AlarmConfig.model_fields)
    return by_section.get(location[0], [])
