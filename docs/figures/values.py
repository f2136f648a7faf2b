"""Single numbers of the pages."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from results import Key, Row, number, ratios, read, select, share, spread

CASE = ("mask", "length", "head_dim")
SHORTER = ("8192", "32768")
WIDTHS = ("64", "128")  # the sizes of heads that sentences speak of


def common(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of the sizes of heads that sentences speak of."""
    return [row for row in rows if row["head_dim"] in WIDTHS]


def speed(name: str, column: str, provider: str, peer: str, by: Key, lengths: Sequence[str], **values: str) -> str:
    """Return the range and the mean of ratios of speed, as text."""
    rows = [row for row in common(select(read(name), **values)) if row["length"] in lengths]
    return spread(ratios(rows, column, provider, peer, by))


def change(name: str, column: str, provider: str, peer: str, **values: str) -> str:
    """Return how much more or less time a provider takes than a peer, as text."""
    return share(ratios(common(select(read(name), **values)), column, provider, peer, CASE))


def linear() -> str:
    """Return R^2 of the line through time against the hidden share of the tiles."""
    x, y, slope, offset = sweep_line()
    rest = sum((b - slope * a - offset) ** 2 for a, b in zip(x, y, strict=True))
    return f"{1 - rest / sum((b - statistics.mean(y)) ** 2 for b in y):.4f}"


def sweep_line() -> tuple[list[float], list[float], float, float]:
    """Return hidden shares of tiles, milliseconds, and the slope and offset of the line through them."""
    rows = read("sweep_h200")
    x = [float(row["sparsity"]) for row in rows]
    y = [float(row["forward_ms"]) + float(row["backward_ms"]) for row in rows]
    slope, offset = statistics.linear_regression(x, y)
    return x, y, slope, offset


def best_stock(task: str, length: str) -> tuple[Row, Row]:
    """Return the rows of flashmask and of the fastest way to run stock TRL."""
    rows = select(read(f"alignment_{task}_h200"), length=length)
    (ours,) = select(rows, provider="flashmask")
    stock = [row for row in rows if row["provider"] != "flashmask"]
    return ours, max(stock, key=lambda row: float(row["tokens_per_second"]))


def gains() -> dict[str, float]:
    """Return each task's speed over the fastest other attention or trainer that was measured, on long rows."""
    sft = read("training_h200")
    fastest = max(float(row["tokens_per_second"]) for row in sft if row["implementation"] != "flashmask")
    group = select(_groups_of_8(), prompt="4096", completion="256")
    speeds = {row["provider"]: float(row["update_tokens_per_second"]) for row in group}
    stock = max(speed for provider, speed in speeds.items() if not provider.startswith("flashmask"))
    return {
        "SFT": number(sft, "tokens_per_second", implementation="flashmask") / fastest,
        "DPO": float(best_stock("dpo", "32768")[0]["against_fastest_stock"]),
        "GRPO": speeds["flashmask"] / stock,
        "reward model": float(best_stock("reward", "32768")[0]["against_fastest_stock"]),
    }


def _groups_of_8() -> list[Row]:
    """Return the rows of updates of 1B with one group of 8 completions a micro-batch, not compiled."""
    return select(read("grpo_h100"), model="llama-3.2-1b", groups="1", generations="8", compiled="off")


def update_times() -> str:
    """Return the milliseconds of an update of GRPO in the three shapes with the fewest tokens to compute."""
    rows = select(_groups_of_8(), provider="flashmask")[:3]
    times = [1000 * int(row["tokens"]) / float(row["update_tokens_per_second"]) for row in rows]
    return f"{min(times):.0f} to {max(times):.0f} ms"


def first_call(cache_state: str) -> str:
    """Return the seconds of a first forward and backward in a fresh process."""
    times = sorted({f"{float(row['first_s']):.1f}" for row in select(read("first_call_h200"), cache=cache_state)})
    return " to ".join((times[0], times[-1]) if len(times) > 1 else times) + " s"


def gain_of(task: str) -> Callable[[], str]:
    """Return a function that writes a task's gain over the fastest other way."""
    return lambda: f"{gains()[task]:.1f}x"
