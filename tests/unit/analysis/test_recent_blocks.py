"""The caches on paper against slow twins."""

from hypothesis import given
from hypothesis import strategies as st

from pointsman.analysis.recent_blocks import RecentBlocks, SeenBlocks
from pointsman.primitives import BlockKey

LENGTH = 80


FORKS = (LENGTH, 0, 20, 20, 50, 50, 1)
"""Where each branch leaves the trunk; the first is the trunk."""


def prompt(branch: int, length: int) -> list[BlockKey]:
    return [BlockKey(1000 * (branch if depth >= FORKS[branch] else 0) + depth + 1) for depth in range(length)]


prompts = st.builds(prompt, st.integers(0, len(FORKS) - 1), st.integers(0, LENGTH))


def twin_leading(keys: list[BlockKey], held: list[BlockKey]) -> int:
    return next((depth for depth, key in enumerate(keys) if key not in held), len(keys))


@given(st.lists(st.tuples(prompts, st.sampled_from([None, None, None, 1, 40, 200])), max_size=100), st.integers(1, 150))
def test_what_was_used_last_stays(uses: list[tuple[list[BlockKey], int | None]], blocks_max: int) -> None:
    cache, held = RecentBlocks(blocks_max), list[BlockKey]()
    for keys, resized in uses:
        if resized is not None:
            blocks_max = resized
            cache.resize(blocks_max)
            del held[: max(0, len(held) - blocks_max)]
        assert cache.leading(keys) == twin_leading(keys, held)
        cache.use(keys)
        held = [key for key in held if key not in keys] + keys[:blocks_max][::-1]
        del held[: max(0, len(held) - blocks_max)]
        assert len(cache) == len(held)
        assert cache._listed == sum(len(use) for use in cache._uses.values())
        assert cache._listed <= 8 * (len(held) + LENGTH)


def test_the_same_prompt_again_and_again_takes_no_more_memory() -> None:
    cache = RecentBlocks(1_000_000)
    for number in range(5_000):
        cache.use([*prompt(0, LENGTH), BlockKey(10**6 + number)])

    assert cache._listed <= 4 * len(cache)
    assert len(cache) == 5_000 + LENGTH


@given(st.lists(prompts, max_size=60), st.integers(1, 400))
def test_the_unbounded_cache_forgets_at_most_the_older_half(uses: list[list[BlockKey]], blocks_max: int) -> None:
    seen = SeenBlocks(blocks_max)
    used: list[BlockKey] = []
    for keys in uses:
        newest = used[max(0, len(used) - blocks_max // 2) :]
        assert twin_leading(keys, newest) <= seen.leading(keys) <= twin_leading(keys, used)
        assert set(seen.unseen(keys)) >= set(keys).difference(used)
        seen.use(keys)
        used = [key for key in used if key not in keys] + keys
        assert len(seen._newer) + len(seen._older) <= blocks_max + LENGTH


@given(st.lists(st.lists(st.integers(1, 12).map(BlockKey), max_size=30), max_size=60), st.integers(1, 10))
def test_forged_prompts_do_no_harm(uses: list[list[BlockKey]], blocks_max: int) -> None:
    cache = RecentBlocks(blocks_max)
    for keys in uses:
        cache.use(keys)
        assert len(cache) <= blocks_max
        assert 0 <= cache.leading(keys) <= len(keys)
        assert cache._listed == sum(len(use) for use in cache._uses.values())
