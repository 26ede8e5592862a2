"""Every rule of a config: keys that contradict each other or the machine are refused by name, others are accepted."""

import importlib.util

import pytest

from unstable_lite.config.reading import parse_config, parse_toml
from unstable_lite.planning.validation import find_problems

ENVS = """
[[train_envs]]
env_id = "TicTacToe-v0-train"
num_players = 2
num_actors = 2
prompt_template = "tiny"
"""
EVAL = '[[eval_envs]]; env_id = "TicTacToe-v0-train"; num_players = 2; prompt_template = "tiny"; '
RANDOM = EVAL + 'fixed_opponent = "scripted:random"; '
ONE_SEAT = ENVS.replace("num_actors = 2", "num_actors = 1")
LIARS_DICE = ONE_SEAT.replace("TicTacToe", "LiarsDice").replace("num_players = 2", "num_players = 3")
FIXED = 'league = {opponent_sampling_strategy = "fixed", fixed_opponents = ["scripted:random"]}; '
DEALS = 'rewards.group_baseline = "duplicate"; '
MIRROR = 'league.opponent_sampling_strategy = "mirror"; '
TURN = 'league.adapter_policy = "turn"; '
NEWER = "league.adapter_policy = 'turn': games of a group are compared as games of one policy, but with run.group_size"
CUSTOM = 'algorithm = "fakes.slow_learners:TakesItsTime"; '
MINE = 'templates.mine.user = "{observation}"; templates.mine.stop = ["<stop>"]; '
ASKED = ENVS.replace("tiny", "mine")
BAD_LAGS = ("2", '"1-7"', "[7]", "[1, 2, 3]", '[1, "7"]', "[0.5, 7]", "{least = 1}", "[true, 2]")
BAD_TAGS = ('["<a>", "<a>"]', '["<a>"]', '["", "</a>"]', '"<a>"', '["<a>", "<stop>"]')
WARMUP = "learner.learning_rate_warmup"
POLICIES = 'league.opponent_sampling_strategy = "mirror"; policies.main.share = 0.7; policies.exploiter.share = 0.3; '
TWO = POLICIES.replace("0.7", "0.5").replace("0.3", "0.5")
THREE = 'policies.third.algorithm = "a2c"; ' + TWO.replace("0.5", "0.3")
PLAYS, RULE = "policies.exploiter.opponents", "policies.exploiter.restart"
KEEPS = f'policies.main.opponents = "population"; {RULE}.at_updates = 5; '
"""A policy that plays the ones that another one leaves; a second key may replace this one's rule."""
ROLES = ENVS.replace("num_actors = 2", 'seats = ["main", "exploiter"]')

REFUSED = [
    ("engine.temperature = 0.009", "engine.temperature = 0.009"),
    ("engine.top_p = 0.95", "engine.top_p = 0.95: importance weights need the whole distribution"),
    ("engine.max_loras = 1", "at least 2 adapter slots"),
    ('engine.kind = "vlm"', "did you mean 'vllm'?"),
    ('engine.kind = "no_such_module:Engine"', "no module 'no_such_module'"),
    ("engine.thinking_tokens = 64; engine.max_generation_len = 64", "engine.thinking_tokens = 64 leaves no room"),
    ("engine.thinking_tokens = 65; engine.max_generation_len = 64", "engine.max_generation_len = 64"),
    *((f"engine.thinking_tokens = {budget}", "engine.thinking_tokens = ") for budget in ("0", "-1", "1.5", '"many"')),
    ("league.opponent_sampling_strategy = {mirror = 1, fixed = inf}", "the weight of 'fixed' is inf"),
    ("league.opponent_sampling_strategy = {pfsp = {prior_games = nan}}", "prior_games = nan"),
    ('league.env_sampling_strategy = {weighted = {weights = {"TicTacToe-v0-train" = inf}}}', "-train' is inf"),
    ('league.env_sampling_strategy = "randm"', "'random'"),
    ('league.env_sampling_strategy = ""', "env_sampling_strategy"),
    ('league.opponent_sampling_strategy = ""', "opponent_sampling_strategy"),
    ('league.adapter_policy = "newest"', "league.adapter_policy = 'newest'"),
    ('algorithm = "reinforc"', "did you mean 'reinforce'?"),
    ('model_name = "builtin:tinny"', "built-in models are builtin:tiny"),
    ('model_name = "./nowhere"', "no config.json"),
    ("run.num_collection_workers = 100001", "run.num_collection_workers = 100001"),
    ("run.num_eval_workers = 100001", "run.num_eval_workers = 100001"),
    ("run.eval_games = 10", "eval_envs"),
    ("run.eval_every = 10", "run.eval_every needs run.eval_games"),
    ("run.exact_samples = 64", "run.exact_samples needs run.exact_every"),
    ("run.exact_samples = 1; run.exact_every = 1", "run.exact_samples = 1"),
    (f'run.output_dir = "{__file__}/out"', "run.output_dir"),
    ('run.name = "ablations/no-kl"', "run.name = 'ablations/no-kl'"),
    ('run.name = "two\\nlines"', "run.name = 'two\\nlines'"),
    ('run.name = "nul\\u0000"', "control character"),
    ('run.name = "../up"', "slash"),
    ('run.name = ".hidden"', "dot"),
    ('lora.initial_lora_path = "/nowhere"', "adapter_model.safetensors"),
    ('lora.initial_critic_path = "/nowhere"', "reinforce has no critic"),
    ('algorithm = "ppo"; lora.initial_critic_path = "/nowhere"', "lora.initial_critic_path"),
    ('lora.target_modules = ["q_proj", "lm_head"]', "lora.target_modules: 'lm_head'"),
    *((f'algorithm = "{name}"; lora.lora_dropout = 0.1', "lora_dropout") for name in ("reinforce", "a2c", "ppo")),
    ('rewards.step_reward_transformation = ["RewardForFormt"]', "'RewardForFormat'"),
    (
        'rewards.step_reward_transformation = [{name = "RewardForFormat", reward = -inf}]',
        "'RewardForFormat': reward = -inf",
    ),
    (EVAL + 'fixed_opponent = "scripted:perfect"', "scripted:random"),
    (RANDOM.replace("TicTacToe", "Othello"), "Othello"),
    (RANDOM + "max_turns = -3", "eval_envs.0.max_turns = -3"),
    (RANDOM.replace("num_players = 2", "num_players = 0"), "num_players = 0"),
    (RANDOM + RANDOM, "eval_envs: TicTacToe-v0-train against scripted:random is listed 2 times"),
    (ENVS + ENVS, "train_envs: TicTacToe-v0-train is listed 2 times"),
    (ENVS.replace("TicTacToe", "Nim") + ENVS + "max_turns = 0", "train_envs.1.max_turns = 0"),
    (ENVS.replace("= 2", "= 0"), "num_actors = 0"),
    (ENVS.replace("num_actors = 2", "num_actors = -1"), "num_actors = -1"),
    ("buffer.batch_delay_buffer = 2.5", "learner.batch_size = 384"),
    ('algorithm = "a2c"; buffer.kind = "steps"', "a2c learns from episodes"),
    ('buffer.kind = "episodes"', "reinforce learns from steps"),
    ("run.group_size = 4", "rewards.group_baseline"),
    ('rewards.group_baseline = "grpo"', "run.group_size = 1"),
    ('run.group_size = 900; rewards.group_baseline = "grpo"', "a group does not fit buffer.buffer_size = 768"),
    ('algorithm = "a2c"; run.group_size = 4; rewards.group_baseline = "grpo"', "critic"),
    (
        'run.group_size = 4; rewards.group_baseline = "grpo"; '
        'rewards.final_reward_transformation = ["RoleAdvantageFormatter"]',
        "RoleAdvantageFormatter is a baseline",
    ),
    (
        'run.group_size = 4; rewards = {group_baseline = "duplicate", final_reward_transformation = ["RoleAdvantage'
        f'ByEnvFormatter"]}}; {FIXED}{ONE_SEAT}',
        "RoleAdvantageByEnvFormatter is a baseline",
    ),
    ('algorithm = "grpo"', "algorithm = 'grpo' compares the games of a group"),
    ('algorithm = "rloo"', "algorithm = 'rloo' compares the games of a group"),
    ('algorithm = "grpo"; run.group_size = 4; rewards.group_baseline = "rloo"', "contradicts algorithm = 'grpo'"),
    ('algorithm = "rloo"; run.group_size = 4; rewards.group_baseline = "grpo"', "contradicts algorithm = 'rloo'"),
    ('algorithm = "rloo"; run.group_size = 4; rewards.group_baseline = "mean"', "contradicts algorithm = 'rloo'"),
    (f"{DEALS}run.group_size = 3; {FIXED}{ONE_SEAT}", "run.group_size = 3 must be even"),
    (f"{DEALS}{FIXED}{ONE_SEAT}", "run.group_size = 1"),
    (f"{DEALS}run.group_size = 4; {FIXED}", "num_actors = 2 gives it both seats of TicTacToe-v0-train"),
    (f"{DEALS}run.group_size = 4; {FIXED}{ONE_SEAT}{LIARS_DICE}", "train_envs.1: LiarsDice-v0-train has 3"),
    (f"{DEALS}run.group_size = 4; {MIRROR}{ONE_SEAT}", "'mirror' gives the policy both seats"),
    (f'{DEALS}run.group_size = 4; algorithm = "a2c"; {FIXED}{ONE_SEAT}', "a2c uses the critic as baseline"),
    (f'{DEALS}run.group_size = 4; algorithm = "grpo"; {FIXED}{ONE_SEAT}', "'duplicate' contradicts algorithm = 'grpo'"),
    (f'{TURN}algorithm = "grpo"; run.group_size = 4', f"{NEWER} = 4"),
    (f'{TURN}algorithm = "rloo"; run.group_size = 2', f"{NEWER} = 2"),
    (f"{TURN}{DEALS}run.group_size = 2", f"{NEWER} = 2"),
    (f'{TURN}algorithm = "a2c"', "league.adapter_policy = 'turn': a2c learns from episodes"),
    (f'{TURN}algorithm = "ppo"', "league.adapter_policy = 'turn': ppo learns from episodes"),
    (f'{TURN}{CUSTOM}buffer.kind = "episodes"', "TakesItsTime learns from episodes, which must be"),
    ("learner.options = {clip_high = 0.28}", "learner.options"),
    ('algorithm = "ppo"; learner.ppo_minibatches = 500', "ppo_minibatches"),
    (f"{WARMUP} = 200", f"{WARMUP} = 200: the schedule ends after 200 updates"),
    (f"{WARMUP} = -1", f"{WARMUP} = -1"),
    ("learner.entropy_target = 0.5", "learner.entropy_coefficient must be above 0"),
    ("learner.entropy_target = 12.0; learner.entropy_coefficient = 0.01", "learner.entropy_target = 12: a token of"),
    (
        'learner.coefficient_schedule = "linear"; learner.entropy_target = 0.5; learner.entropy_coefficient = 0.01',
        "learner.coefficient_schedule = 'linear': learner.entropy_target already changes the entropy's coefficient",
    ),
    ('learner.coefficient_schedule = "exponential"', "learner.coefficient_schedule = 'exponential'"),
    ('learner.kl_reference = "stage:0"', "learner.kl_reference = 'stage:0'"),
    ("learner.clip_range_high = 0.28", "learner.clip_range_high: reinforce does not clip"),
    ('algorithm = "a2c"; learner.clip_range_high = 0.28', "learner.clip_range_high: a2c does not clip"),
    (
        'learner.importance_weight_mode = "mask"; learner.importance_weight_cap = 1.0',
        "learner.importance_weight_mode = 'mask' with importance_weight_cap = 1 ",
    ),
    ("learner.kl_average_decay = 1.0", "learner.kl_average_decay = 1.0"),
    ("learner.kl_average_decay = nan", "learner.kl_average_decay = nan"),
    ("learner.entropy_target = 0.0", "learner.entropy_target = 0.0"),
    ("learner.clip_range_high = 0.0", "learner.clip_range_high = 0.0"),
    ('learner.learning_rate_schedule = "step"', "learner.learning_rate_schedule = 'step'"),
    ('learner.importance_weight_level = "turn"', "learner.importance_weight_level = 'turn'"),
    ('learner.importance_weight_mode = "drop"', "learner.importance_weight_mode = 'drop'"),
    ('learner.kl_reference = "magnet"', "learner.kl_reference = 'magnet'"),
    pytest.param(
        'learner.optimizer = "adamw8bit"',
        "bitsandbytes is not installed",
        marks=pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is not None, reason="it is installed"),
    ),
    (
        "league = {opponent_sampling_strategy = {lagged = 1.0}, opponent_lag = [1, 9]}; engine.max_loras = 8; "
        f"{ONE_SEAT}",
        "at least 12 adapter slots",
    ),
    (
        f'league = {{opponent_sampling_strategy = "uniform", max_active_checkpoints = 1}}; {ONE_SEAT}',
        "max_active_checkpoints = 1",
    ),
    (
        "league.max_active_checkpoints = 5; engine.max_loras = 7; run = {eval_games = 2, eval_every = 1}; " + RANDOM,
        "at least 8 adapter slots",
    ),
    ("alarms.identical.threshold = 1.0", "alarms.identical.threshold = 1"),
    ("alarms.staleness.threshold = -1", "alarms.staleness.threshold = -1"),
    ("alarms.staleness.threshold = inf", "alarms.staleness.threshold = inf"),
    ("alarms.starved.threshold = 0", "alarms.starved.threshold = 0"),
    ("alarms.skipped.updates = 2", "alarms.skipped.updates"),
    ('opponents.base_url = "api.example.com"', "opponents.base_url"),
    *((f'opponents.base_url = "https://{url}"', "OPENAI_API_KEY") for url in ("me:key@e.com/v1", "e.com/v1?key=k")),
    ('opponents.base_url = "https://example.com/v1#k"', "OPENAI_API_KEY"),
    ('opponents.api_key = "sk"', "'opponents.api_key'"),
    ("opponents.max_requests = 0", "opponents.max_requests = 0"),
    *((f"league.opponent_lag = {lag}", "write [least, most], two whole numbers of updates") for lag in BAD_LAGS),
    *((f"{MINE}templates.mine.think = {tags}; {ASKED}", "templates.mine.think") for tags in BAD_TAGS),
    (f'templates.mine.user = "{{observaton}}"; {ASKED}', "{observaton}"),
    ('templates.mine.usr = "{observation}"', "'templates.mine.usr'"),
    (ENVS + 'action_extraction_fn = "no_such_module:f"', "'no_such_module'"),
    (
        'run.mode = "sync"',
        'run.mode = \'sync\' is no longer a key: set run.schedule ("async" or "sync") and engine.when_shared',
    ),
    ("learner.gradient_checkpointing = false", "set learner.activation_checkpointing"),
    ("learner.use_trainer_cache = true", "learner.use_trainer_cache = True is no longer a key: remove it"),
    ("run.max_void_games = 9", "it is a constant now"),
    ("alarms.entropy.updates = 9", "alarms.entropy.updates = 9 is no longer a key: remove it; it is a constant now"),
    ("engine.enforce_eager = true", "set it in engine.options"),
    ("lora.lora_rnak = 8", "'lora.lora_rnak'; did you mean 'lora_rank'?"),
    ("alarms.entropi = { threshold = 1 }", "'alarms.entropi'; did you mean 'entropy'?"),
    ('alarms.staleness.action = "wran"', "alarms.staleness.action = 'wran'"),
    (POLICIES.replace("0.7", "0.6"), "policies: the shares sum to 0.9; let all of them sum to 1, or"),
    (POLICIES.replace("0.7", "0.8"), "policies: the shares sum to 1.1; let all of them sum to 1, or"),
    (POLICIES + "policies.third = {}", "policies: the shares sum to 1; let all of them sum to 1, or leave one out"),
    (POLICIES.replace("0.7", "1.0"), "policies.main.share = 1.0"),
    ("; ".join(f"policies.p{number} = {{}}" for number in range(32)), "there are 32, but at most 31 have ids"),
    (TWO + 'policies."two words".algorithm = "a2c"', "policies.two words"),
    (f'{TWO}{PLAYS} = "policy:mian"', f"{PLAYS}: there is no [policies.mian]; did you mean 'main'?"),
    (f'{TWO}{PLAYS} = {{"policy:mian/past" = 1}}', f"{PLAYS}: there is no [policies.mian]; did you mean 'main'?"),
    (
        f'{TWO}{PLAYS} = {{"policy:main" = inf}}',
        "policies.exploiter: opponent_sampling_strategy: the weight of 'policy:main' is inf",
    ),
    (f'{TWO}{PLAYS} = {{"policy:main" = {{weight = 1, lag = 2}}}}', "opponent_sampling_strategy 'policy:main': "),
    (f'{TWO}{PLAYS} = "mirorr"', "policies.exploiter: unknown opponent_sampling_strategy 'mirorr'; did"),
    (
        'league.opponent_sampling_strategy = "policy:main"',
        "league.opponent_sampling_strategy: there is no [policies.main]",
    ),
    (TWO + EVAL + 'fixed_opponent = "policy:mian"', "eval_envs.0.fixed_opponent: there is no [policies.mian]; did you"),
    (
        TWO + EVAL + 'fixed_opponent = "policy:main/past"',
        "eval_envs.0.fixed_opponent: there is no [policies.main/past]",
    ),
    (EVAL + 'fixed_opponent = "policy:main"', "eval_envs.0.fixed_opponent: there is no [policies.main]; known: none"),
    (
        TWO + 'league.fixed_opponents = ["policy:main"]',
        "league.fixed_opponents: 'policy:main' learns, so it is not fixed",
    ),
    (f'{TWO}{ONE_SEAT}fixed_opponents = ["policy:main"]', "train_envs.0.fixed_opponents: 'policy:main' learns"),
    (TWO + ROLES.replace("exploiter", "exploter"), "train_envs.0.seats: there is no [policies.exploter]; did you mean"),
    (ROLES, "train_envs.0.seats: there is no [policies.main]; known: none"),
    (TWO + ROLES.replace('", "exploiter', ""), "train_envs.0.seats: name a policy for each of num_players = 2"),
    (TWO + ROLES + "num_actors = 1", "train_envs.0.seats: name a policy for each of num_players = 2 seats, and leave"),
    (TWO + ROLES + 'fixed_opponents = ["base"]', "fixed_opponents are never met, because `seats` gives every seat"),
    (f"{TWO}{DEALS}run.group_size = 4; {ROLES}", "from both seats; leave out train_envs.0.seats, or use 'rloo'"),
    ("policies = {main = {}, base = {}}", "policies.base: a lineage may begin from 'base', so"),
    ('algorithm = "a2c"; run.group_size = 4', "a2c has a critic and cannot learn from groups; set 1, or"),
    (THREE + ROLES, "policies.third: it has no game: in some train env give it a seat, or"),
    (
        f'policies.main.opponents = "none"; policies.exploiter.opponents = "mirror"; {ONE_SEAT}',
        "policies.main: train env",
    ),
    (
        f'{TWO}{PLAYS} = "policy:main/past"; league.max_active_checkpoints = 1; {ONE_SEAT}',
        "opponent_sampling_strategy = 'policy:main/past' draws older ones: set 2",
    ),
    (
        f"{KEEPS}league.max_active_checkpoints = 1; {ONE_SEAT}",
        "policies.main: league.max_active_checkpoints = 1 allows only the current policy",
    ),
    (f'{KEEPS}{RULE}.at_points = 0.7; {PLAYS} = "mirror"; {ONE_SEAT}', f"{RULE}.at_points counts games"),
    (f'{KEEPS}{RULE}.at_points = 0.7; {PLAYS} = "policy:main"; {ROLES}', f"{RULE}.at_points counts games"),
    (
        TWO + "engine.max_loras = 3",
        "engine.max_loras = 3: the league of main, exploiter needs at least 4 adapter slots",
    ),
    (
        TWO + 'policies.main.algorithm = "reinforc"',
        "policies.main.algorithm = 'reinforc' is not known; did you mean 're",
    ),
    (TWO + 'policies.main.algorithm = "grpo"', "policies.main: algorithm = 'grpo' compares the games of a group"),
    (
        f'{TWO}policies.main.algorithm = "a2c"; buffer.kind = "steps"',
        "policies.main: buffer.kind = 'steps': a2c learns",
    ),
    (TWO + "policies.main.learner.optimizer = 'adamw8bit'", "optimizer cannot differ among policies; these keys can"),
    (TWO + "policies.main.learner.learning_rate = -1.0", "policies.main.learner"),
    (TWO + "policies.main.learner.clip_range_high = 0.3", "policies.main: learner.clip_range_high: reinforce does not"),
    ("buffer.buffer_size = 10", "buffer.buffer_size = 10"),
    (ENVS.replace('"tiny"', '"quen3-zs"'), "did you mean 'qwen3-zs'?"),
    ("batch_size = 4", "did you mean 'learner.batch_size'?"),
    ("lr = 3.0", "did you mean 'learner.learning_rate'?"),
    ("run.temperature = 1.0", "did you mean 'engine.temperature'?"),
    ("learner.lr = 3.0", "did you mean 'learning_rate'?"),
]
ACCEPTED = [
    f"{MINE}{ASKED}",
    'algorithm = "fakes.slow_learners:TakesItsTime"; lora.lora_dropout = 0.1; learner.clip_range_high = 0.28',
    "engine.top_p = 0.95; engine.allow_top_p = true",
    "engine.thinking_tokens = 63; engine.max_generation_len = 64",
    RANDOM + EVAL + 'fixed_opponent = "scripted:optimal"',
    f'{WARMUP} = 199; learner.learning_rate_schedule = "cosine"; learner.entropy_target = 0.5; '
    "learner.entropy_coefficient = 0.001",
    'algorithm = "grpo"; run.group_size = 8; learner.importance_weight_level = "sequence"; learner.clip_range = 3e-4; '
    "learner.clip_range_high = 4e-4",
    'algorithm = "ppo"; learner.kl_reference = "average"; learner.kl_coefficient = 0.1; '
    'learner.importance_weight_mode = "mask"',
    'learner = {entropy_coefficient = 0.1, coefficient_schedule = "inverse_sqrt", kl_reference = "stage:20", '
    "kl_coefficient = 0.1}",
    'algorithm = "grpo"; run.group_size = 4; rewards.group_baseline = "mean"',
    'run.group_size = 4; rewards.group_baseline = "rloo"',
    TWO,
    POLICIES + TURN,
    f'{TWO}policies.main.algorithm = "a2c"; {PLAYS} = {{"policy:main" = 0.5, "policy:main/past" = 0.3, lagged = 0.2}}; '
    f"{ONE_SEAT}{EVAL}fixed_opponent = 'policy:exploiter'",
    TWO + "run.schedule = 'sync'; " + ROLES,
    f'policies.main.opponents = "mirror"; policies.exploiter.opponents = "policy:main"; {ONE_SEAT}',
    TWO + 'algorithm = "grpo"; run.group_size = 4; ' + ROLES,
    TURN,
    TURN + 'run.schedule = "sync"',
    TURN + CUSTOM,
    'tracker.wandb_project = ""',
    *(f'run.name = "{name}"' for name in ("", "lr=1e-5, seed 3", "größer", "v1.2_[b]")),
]


def problems_of(text: str) -> list[str]:
    """Return the problems of a config in TOML, `; ` for a new line; `ENVS` are its training envs if it has none."""
    table = parse_toml((text + ENVS * ("[[train_envs]]" not in text)).replace("; ", "\n").encode(), "test")
    config, problems = parse_config(table)
    assert config is not None, problems
    return problems + find_problems(config)


@pytest.mark.parametrize(("text", "says"), REFUSED)
def test_impossible_config_is_refused_with_the_key(text, says):
    problems = problems_of(text)
    assert any(says in problem for problem in problems), problems


@pytest.mark.parametrize("text", ACCEPTED)
def test_possible_config_has_no_problem(text):
    assert problems_of(text) == []
