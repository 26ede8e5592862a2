"""Sections of the run, its engines and its learner."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from unstable_lite.config.section import LastingPath, Section, UserPath


class RunConfig(Section):
    schedule: Literal["async", "sync"] = "async"
    """Schedule of games and updates.

    `async`: games are played while the learner learns. `sync`: in turns, a complete round of games and then an update,
    so that the seed determines the run: bit for bit on one machine with the embedded engine. It is slower, helps to
    find the cause of a changed result, and plays no games of `num_eval_workers`."""
    name: str | None = None
    """Name of the run directory, without slashes; default: `unstable-lite-<model>-<envs>`."""
    learning_steps: int = Field(200, ge=1)
    """Number of updates of the learner, and so of adapter versions."""
    num_collection_workers: int = Field(256, ge=1, le=100_000)
    """Most training games in flight; with `schedule` "sync", games of one round. Fewer are in flight if more would
    become older than `buffer.max_staleness` allows: `check` predicts the number, the metric `run/games_in_flight`
    reports it."""
    num_eval_workers: int = Field(16, ge=0, le=100_000)
    """Most evaluation games in flight beside training; with 0, only `eval_games` evaluates.

    eval.jsonl has their results by checkpoint, labelled "concurrent". Games in flight when training ends are abandoned,
    so the last checkpoints' results come from shorter games.
    """
    eval_share: float = Field(0.1, gt=0, le=1)
    """Largest share of the newest 512 games that `num_eval_workers` play, at least one game; 1: no limit, as in the
    reference, so that they also play while training games wait for the learner. The metric `run/eval_share` reports
    it. The games of `eval_games` do not count."""
    eval_games: int = Field(0, ge=0)
    """Games per eval env and evaluation, balanced over the seats, before the first and after the last update."""
    filter_opponent_invalid: bool = False
    """Whether to leave out the steps of a player whose game ended with another player's invalid move."""
    eval_every: int | None = Field(None, ge=1)
    """Number of updates between further evaluations by `eval_games`, which run while training continues."""
    exact_every: int | None = Field(None, ge=1)
    """Number of updates between two exact computations of the policy's exploitability in each OpenSpiel env, for which
    the learner pauses (docs/evaluate.md). Default: none."""
    exact_samples: int | None = Field(None, ge=2)
    """Number of answers in each decision state from which `exact_every` estimates the exploitability, for models that
    think before they answer. Default: it is computed from the probability of each legal answer."""
    seed: int = Field(0, ge=0)
    """Seed of envs, samplers and sampling; training and evaluation envs have separate seeds. With `schedule` "async",
    an engine draws a random seed when it restarts or the run resumes, so that it does not repeat its samples."""
    output_dir: UserPath = Path("outputs")
    """Parent of the run directories: `<output_dir>/<date>/<time>-<name>/`."""
    checkpoint_every: int = Field(10, ge=1)
    """Number of updates between checkpoints of adapter, optimiser and league on disk; the last update always has
    one."""
    game_timeout_s: float = Field(1800.0, gt=0)
    """Longest wall-clock time of one game, without the learner's turns while all engines sleep (`engine.when_shared`);
    a longer game is void."""
    group_size: int = Field(1, ge=1)
    """Number of times that each training game is played, with the same env, seed, opponents and (except for
    "duplicate") seats: see `rewards.group_baseline`."""
    env_timeout_s: float = Field(5.0, gt=0)
    """Longest time of one call into an env; a longer call is interrupted and its game is void."""
    max_restarts: int = Field(5, ge=0)
    """Number of deaths of one worker within an hour that the run survives by restarting it."""


class EngineConfig(Section):
    kind: str = "auto"
    """`vllm`, `transformers`, `vllm-server`, `scripted`, `auto` (vLLM on GPUs if it is usable, else
    transformers), or `module:Class`."""
    devices: tuple[int | Literal["cpu"], ...] | Literal["auto"] = "auto"
    """Device of each worker: a CUDA device number, or "cpu". `auto`: every GPU but the learner's; a single GPU is
    shared; without a GPU, one worker on the CPU."""
    temperature: float = Field(0.6, gt=0)
    """Sampling temperature; the learner divides its logits by the same value. Training needs at least 0.01."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling threshold. The reference hides 0.95 here; below 1 the learner's importance weights are wrong."""
    allow_top_p: bool = False
    """Whether to accept `top_p` below 1, although importance weights are then wrong."""
    max_generation_len: int = Field(4096, ge=1)
    """Largest number of tokens of one completion."""
    thinking_tokens: int | None = Field(None, ge=1)
    """Largest number of tokens that a model may think in one turn, less than `max_generation_len`: an open thought is
    then closed for it, and it answers with the tokens that remain. Default: thinking has no budget of its own."""
    max_model_len: int = Field(8192, ge=2)
    """Largest number of tokens of prompt and completion together; at most the model's own limit, which with LongRoPE is
    that of its short factors (`original_max_position_embeddings`), because beyond it no two libraries rotate alike."""
    max_parallel_seq: int = Field(256, ge=1)
    """Number of requests that one worker runs at once. Reference: 128, too few to keep a large GPU busy."""
    max_loras: int = Field(8, ge=1)
    """Number of adapter versions that are loaded at once: the current one, those of games in flight, and opponents. The
    default is higher if the league needs more, as `lagged` does; `check` shows it."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Type of the base model; `auto`: 16 bits on GPUs, on the CPU the faster type for the model's width."""
    threads: int | None = Field(None, ge=1)
    """Number of CPU threads of one worker. Default: 1 on a GPU, else the cores that the process may use (a container's
    CPU quota counts), divided among all workers. For a small model, another "cpu" in `devices` uses a core better than
    another thread does; see docs/gpus.md."""
    when_shared: Literal["split", "sleep"] = "split"
    """Use of a device that the learner shares. `split`: both compute at the same time, and a GPU's memory is divided by
    `gpu_memory_utilization` of both sections. `sleep`: in turns; while the learner learns, the engines on its devices
    release their memory, and each is checked before it plays again. Engines on other devices always play; without any,
    games wait."""
    gpu_memory_utilization: float | None = Field(None, gt=0, le=1)
    """Share of a GPU's memory that a worker takes. Default: 0.9 (on a GPU that the learner shares, 0.5, or 0.7 if
    `when_shared` is "sleep"), divided by the number of engines on the GPU."""
    kv_cache_gb: float = Field(1.0, gt=0)
    """Memory for the KV cache of an engine on the CPU."""
    tensor_parallel: int = Field(1, ge=1)
    """`vllm` only: number of GPUs of one engine, which divide the model if it does not fit on one GPU. `devices` lists
    that many for each engine. Untested: no machine with two GPUs has run it yet."""
    quantization: (
        Literal["fp8_per_tensor", "fp8_per_channel", "fp8_per_block", "int8_per_channel_weight_only"] | None
    ) = None
    """`vllm` only: number format to which the engine converts the base when it loads it; adapters keep 16 bits. The
    learner keeps the base as it is, so the importance weights correct the difference. Untested: no GPU has run it
    yet."""
    options: dict[str, Any] = {}  # noqa: RUF012 (pydantic copies it)
    """`vllm` only: further arguments of `vllm.EngineArgs`, under its names."""
    start_timeout_s: float = Field(600.0, gt=0)
    """Time limit for a worker, engine or learner, to load its model."""
    urls: tuple[str, ...] = ()
    """`vllm-server` only: URLs of the vLLM servers, with one worker for each; see docs/cluster.md. If they require a
    key, it comes from the environment variable VLLM_API_KEY."""
    adapter_folder: UserPath | None = None
    """`vllm-server` only: a folder that this machine and every server see under the same absolute path."""
    replies: tuple[str, ...] = ("\\boxed{[0]}",)
    """`scripted` only: completions that the engine draws from."""

    @property
    def gpu_share(self) -> float:
        """`gpu_memory_utilization`, or its default for an engine that has the GPU to itself."""
        return self.gpu_memory_utilization or 0.9


Schedule = Literal["constant", "linear", "cosine", "inverse_sqrt"]
"""Schedule of a number of the learner from update to update."""


class LearnerConfig(Section):
    devices: tuple[int | Literal["cpu"], ...] | Literal["auto"] = "auto"
    """Device of each rank: a CUDA device number, or "cpu", which may be repeated. The ranks divide every batch by
    tokens and make the same update that one rank would make. `auto`: the first GPU that `engine.devices` leaves free,
    or the CPU if there is none."""
    remote_ranks: int = Field(0, ge=0)
    """Number of further ranks that join from other machines, with
    `torchrun … -m unstable_lite.learner.remote_rank HOST:PORT`."""
    rendezvous: str | None = None
    """`HOST:PORT` of this machine at which remote ranks join. The traffic is neither encrypted nor authenticated, as
    always with torch.distributed: use a network that no other machine can reach."""
    batch_size: int = Field(384, ge=1)
    """Number of steps of one update; at least as many if it learns from whole trajectories (`a2c`, `ppo`)."""
    mini_batch_size: int | None = Field(None, ge=1)
    """Most sequences of one micro-batch; the gradient does not depend on it. Reference: 1."""
    max_tokens_per_micro_batch: int = Field(16384, ge=1)
    """Most tokens, padding included, of one micro-batch, which is filled with sequences of similar length."""
    learning_rate: float = Field(1e-5, gt=0)
    """Learning rate of the adapter (AdamW)."""
    learning_rate_schedule: Schedule = "constant"
    """`linear`: the learning rates, including the critic's, fall by the same amount after every update and would reach
    0 after `run.learning_steps`; `cosine`: along half a cosine wave. A resume with more learning steps raises them to
    the new schedule. `inverse_sqrt`: the n-th update after the warm-up has 1/√n of them, regardless of the learning
    steps."""
    learning_rate_warmup: int = Field(0, ge=0)
    """Number of initial updates in which the learning rates rise by equal amounts, before the schedule begins."""
    optimizer: Literal["adamw", "adamw8bit"] = "adamw"
    """`adamw8bit` keeps the moments of large matrices in 8 bits; it needs bitsandbytes."""
    weight_decay: float = Field(0.01, ge=0)
    """Weight decay of AdamW."""
    gradient_clipping: float = Field(0.2, gt=0)
    """Largest L2 norm of the gradient; `learner/grad_clipped` is the share of steps that it limits."""
    activation_checkpointing: bool | Literal["auto"] = "auto"
    """Whether to recompute a layer's activations in the backward pass, which needs much less memory and a third more
    computation. `auto`: only if a micro-batch would not fit the learner's part of a GPU, or a quarter of the machine's
    memory on the CPU, as computed from the model's shape; if half of one fits without it, `max_tokens_per_micro_batch`
    is lowered instead. `check` shows the decision, and a resumed run keeps it."""
    max_train_len: int | None = Field(None, ge=1)
    """Most tokens of prompt and completion together. Longer steps are not trained on: `learner/pct_truncated`."""
    importance_weight_cap: float = Field(2.0, gt=0)
    """Largest importance weight π/μ, of the policy to the one that sampled."""
    importance_weight_mode: Literal["truncate", "mask"] = "truncate"
    """Importance weight of a ratio above the cap: the cap, or 0 (`mask`). A low ratio is its own weight in both."""
    importance_weight_level: Literal["token", "sequence"] = "token"
    """`token`: each token has its own ratios. `sequence`: all tokens of a completion share the geometric mean of its
    tokens' ratios, both in the importance weight and in the clipped ratio of `ppo` and `grpo` (GSPO)."""
    kl_coefficient: float = Field(0.0, ge=0)
    """Penalty per nat of KL(policy ‖ reference) per token, in units of the advantage; 0: not computed."""
    entropy_coefficient: float = Field(0.0, ge=0)
    """Bonus per nat of token entropy, in units of the advantage. A value above 0 keeps the policy exploring."""
    entropy_target: float | None = Field(None, gt=0)
    """Mean entropy of a token, in nats (`learner/entropy`), that the coefficient is adapted to: after each update it
    changes by at most 10 %, from `entropy_coefficient` to at most 100 times more or less. Default: it is constant."""
    coefficient_schedule: Schedule = "constant"
    """Schedule of `kl_coefficient` and `entropy_coefficient`, by the rules of `learning_rate_schedule`, without its
    warm-up. It contradicts `entropy_target`."""
    kl_reference: Annotated[str, Field(pattern=r"^(initial|base|average|stage:[1-9]\d*)$")] = "initial"
    """Reference policy of `kl_coefficient`. `initial`: the adapter at `lora.initial_lora_path`, or the base if there is
    none; `base`: the base model without an adapter; `average`: a slow moving average of the adapter (a magnet);
    `stage:N`: a copy of the adapter, renewed every N updates."""
    kl_average_decay: float = Field(0.99, ge=0, lt=1)
    """Weight of the old average when an update's adapter is added to it, with `kl_reference` "average"."""
    critic_learning_rate: float = Field(5e-5, gt=0)
    """Learning rate of the critic's adapter and head."""
    critic_warmup_updates: int = Field(0, ge=0)
    """Number of initial updates that train only the critic; each still makes the unchanged policy a new
    version."""
    gamma: float = Field(1.0, ge=0, le=1)
    """Discount per turn of the same player, for algorithms with a critic."""
    gae_lambda: float = Field(1.0, ge=0, le=1)
    """λ of generalised advantage estimation: 1 uses the actual later rewards, 0 the critic's estimate after one
    turn."""
    normalize_adv: bool = True
    """Whether to normalise a batch's advantages to mean 0 and standard deviation 1, for algorithms with a critic."""
    ppo_epochs: int = Field(4, ge=1)
    """Number of passes of `ppo` and `grpo` over one batch; an update always makes one adapter version."""
    ppo_minibatches: int = Field(1, ge=1)
    """Number of optimiser steps of one such pass."""
    clip_range: float = Field(0.2, gt=0)
    """`ppo` and `grpo`: distance from 1 beyond which the ratio to the update's first policy gains nothing more."""
    clip_range_high: float | None = Field(None, gt=0)
    """The same distance above 1 (clip-higher); default: `clip_range`."""
    options: dict[str, Any] = {}  # noqa: RUF012 (pydantic copies it)
    """Keyword arguments of a custom algorithm's `__init__`."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Type of the frozen base; adapters and optimiser are always float32. `auto`: bfloat16 if the
    device computes it."""
    kernels: Literal["torch", "liger"] = "torch"
    """`liger`: norms, rotary embeddings and gated MLPs are computed by the fused kernels of liger-kernel, on GPUs."""
    gpu_memory_utilization: float | None = Field(None, gt=0, le=1)
    """Largest share of a GPU's memory that the learner takes; beyond it, micro-batches become smaller. Default: if
    engines share the GPU at the same time, the share that they leave minus 0.05; else no limit."""
    threads: int | None = Field(None, ge=1)
    """Number of CPU threads. Default: 4 on a GPU, else the cores divided among all workers."""
    canary_tolerance: float = Field(0.2, gt=0)
    """Largest mean |Δ log p| between engine and learner on the base model that counts as rounding at startup; with more
    the run does not start. Afterwards adapters are judged against the measured value."""

    @property
    def kl_stage(self) -> int | None:
        """Number of updates for which `kl_reference` keeps a copy of the adapter; None: it is not a stage."""
        _, _, updates = self.kl_reference.partition(":")
        return int(updates) if updates else None


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
    """PEFT directory of the adapter to start from."""
    initial_critic_path: LastingPath | None = None
    """`critic/` directory of a checkpoint, for an algorithm with a critic to start from."""


def reference_adapter(learner: LearnerConfig, lora: LoraConfig) -> str | None:
    """Return which frozen adapter the learner keeps as reference of its KL penalty; None: the base, or no penalty.

    Its name is "initial", "average" or "stage".
    """
    name, _, _ = learner.kl_reference.partition(":")
    is_base = name == "base" or (name == "initial" and lora.initial_lora_path is None)
    return None if is_base or not learner.kl_coefficient else name


EMBEDDINGS = ("lm_head", "embed_tokens")
"""Names of the head and the token embedding in nearly every model."""


def no_adapter_at(target: str) -> str:
    """Return the reason why the head or the token embedding cannot be in `lora.target_modules`."""
    return (
        f"lora.target_modules: {target!r} is the model's head or token embedding, which the learner does not train and "
        "engines do not adapt; name layers between the two"
    )


class BufferConfig(Section):
    kind: Literal["auto", "steps", "episodes"] = "auto"
    """Content of a batch; `auto`: as the algorithm requires, steps for a `module:Class`."""
    buffer_size: int | None = Field(None, ge=1)
    """Number of steps waiting for the learner at which no new game starts; default 2 × batch_size."""
    max_staleness: int = Field(8, ge=0)
    """Most updates since a step was sampled. The number of games in flight is chosen so that their steps are trained on
    in time; steps that are older nevertheless are dropped and counted. At a high learning rate 2 may be too many."""
    batch_delay_buffer: float = Field(1.0, ge=1)
    """Number of waiting steps, in batches, at which a batch is drawn. Reference: 1.5, which mixes games more and trains
    later."""


class Transformation(Section):
    name: str
    model_config = ConfigDict(frozen=True, extra="allow")


class RewardConfig(Section):
    """Lists of transforms, applied in order: a name, or a table of `name` and its keyword arguments.

    The default of a key that is None depends on the algorithm (docs/rewards.md); `check` shows the result.
    """

    final_reward_transformation: tuple[Transformation | str, ...] | None = None
    """Transforms of `(reward, pid, env_id)` to a reward, applied once for each trained player of a game."""
    step_reward_transformation: tuple[Transformation | str, ...] | None = None
    """Transforms of `(player_traj, step_index, reward)` to a reward, applied once for each turn of the player."""
    sampling_reward_transformation: tuple[Transformation | str, ...] | None = None
    """Transforms of `(steps)` to steps, applied once per batch."""

    group_baseline: Literal["grpo", "mean", "rloo", "duplicate"] | None = None
    """Baseline of a player's reward among the games of its group (`run.group_size`): `grpo` subtracts the group's mean
    and divides by its standard deviation, `mean` only subtracts it (Dr. GRPO), `rloo` subtracts the mean of the other
    games. `duplicate`, for two-player
    games against an opponent: the policy plays the group's deal from each seat in turn, and the mean reward at the
    other seat is added (docs/rewards.md). Default: `algorithm`, if it is `grpo` or `rloo`. Role advantages and batch
    normalisation, which are baselines too, cannot be added to it."""
    reject_zero_signal: bool = False
    """Whether steps whose results are all alike do not count towards a batch: those of a group, or without groups those
    of one env, seat and kind of opponents among as many steps as a batch has. At most 4 batches of steps are played for
    one; then such steps complete it."""


class SftConfig(Section):
    """`unstable-lite sft`: train an adapter by imitation, for `lora.initial_lora_path` of a run."""

    players: tuple[str, ...] = ()
    """Players of the `train_envs`, named as in `league.fixed_opponents`. In an env's g-th game, seat i goes to player
    number (g + i) modulo the number of players; a name may be listed twice."""
    imitate: tuple[str, ...] | None = None
    """Players whose turns are kept; default: all."""
    filter: tuple[Literal["winners", "valid"], ...] = ("winners", "valid")
    """`winners`: turns of the game's winner (in a single-player game: with a reward above 0). `valid`: turns whose
    answer has the requested form and did not end the game as an invalid move."""
    pairs: int = Field(750, ge=1)
    """Number of turns to keep."""
    data: UserPath | None = None
    """JSONL file to train on, all pairs of it, instead of playing games. Each line has an `observation`, from which the
    template makes the prompt, or a `prompt`; and an `action`, which is written as the template requests, or a
    `completion`. `env_id` names one of `train_envs` (default: the first)."""
    output: UserPath = Path("warm_start")
    """Directory for the pairs (`pairs.jsonl`), the adapter, and the record of how it was made (`sft.json`)."""
    epochs: int = Field(3, ge=1)
    """Number of passes over the pairs."""
    learning_rate: float = Field(1e-4, gt=0)
    """Learning rate of the adapter (AdamW)."""
    batch_size: int = Field(32, ge=1)
    """Number of pairs of one optimiser step."""
    holdout: float = Field(0.1, ge=0, lt=1)
    """Share of the pairs that is only evaluated; no prompt is both trained on and held out."""
