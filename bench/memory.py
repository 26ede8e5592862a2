"""Memory of the whole orchestrator, by number of games at once.

Resident memory of the one process that plays them, after all imports, and when twice as many games are over as are
played at once: games, records, ratings, windows, the buffer, transcripts. The other side is the plain way, a process
for each game, as in the reference: one `ta.make` game in a fresh interpreter. Memory that such processes share (a third
of it: the interpreter's own code) counts in each of them; the reference's also load Ray and torch.
"""

from __future__ import annotations

from statistics import median

from bench.harness import Options, Questioner, Report, Subject, Subjects, Target, memory_mb
from bench.orchestrator import ENV_ID, GAMES, WHOLE
from bench.orchestrator import MODULE as ORCHESTRATOR

MODULE = "bench.memory"


def run(options: Options) -> Report:
    report = Report(bench="memory", question="Memory of the orchestrator", options=options)
    counts = (8, GAMES) if options.small else (8, GAMES, 4096)
    report.sizes = {"env": ENV_ID, "games": counts}
    memory: dict[int, list[float]] = {num_games: [] for num_games in counts}
    peaks: dict[int, list[float]] = {num_games: [] for num_games in counts}
    plain, imports = list[float](), list[float]()
    for _ in range(options.rounds):
        with Subjects() as subjects:
            plain.append(subjects.start(MODULE).info["memory_mb"])
        for num_games in counts:
            with Subjects() as subjects:
                sizes = WHOLE | {"games": num_games}
                subject = subjects.start(ORCHESTRATOR, kind="orchestrator", seed=options.seed, **sizes)
                answer = _after_two_rounds(subject, num_games, options)
            imports.append(subject.info["import_mb"])
            memory[num_games].append(answer["memory_mb"])
            peaks[num_games].append(answer["peak_mb"])
    report.add("a process for one game", "MB", plain)
    report.add("after the imports", "MB", imports)
    for num_games, values in memory.items():
        report.add(f"{num_games} games", "MB", values)
        report.add(f"{num_games} games, at the peak", "MB", peaks[num_games])
        report.add(f"for each of {num_games} games", "kB", [1e3 * (mb - median(imports)) / num_games for mb in values])
        report.add(f"a process for each ÷ {num_games} games", "×", [num_games * median(plain) / mb for mb in values])
    if GAMES in memory:
        report.add_figure(f"{GAMES} games", "MB", memory[GAMES], Target(bound="≤", value=100))
    return report


def _after_two_rounds(subject: Subject, num_games: int, options: Options) -> dict[str, float]:
    """Measure until twice as many games are over as are played at once."""
    while True:
        answer = subject.measure(seconds=options.seconds)
        if answer["games"] >= 2 * num_games:
            return answer


def measure_one_game(questioner: Questioner) -> None:
    import textarena as ta

    env = ta.make(ENV_ID)
    env.reset(num_players=2, seed=questioner.arguments.get("seed", 0))
    for move in ("[0]", "[1]", "[2]"):
        env.get_observation()
        env.step(move)
    questioner.answer({"memory_mb": memory_mb("now")})


if __name__ == "__main__":
    measure_one_game(Questioner())
