"""The ingress with `--forward-tenant`, in front of an engine that writes down what it got."""

from tests.support.ingress_world import COMPLETIONS, TOKENS, world_with


async def test_engines_are_told_whose_request_it_is_where_that_was_asked_for() -> None:
    async with (
        world_with(forward_tenant=True) as world,
        world.post(COMPLETIONS, {**TOKENS, "user": "team-a"}) as answer,
    ):
        await answer.read()
        told = world.one.received[0].fields["vllm_xargs"]

    assert told == {"pointsman_client": "team-a"}


async def test_engines_are_not_told_otherwise() -> None:
    async with world_with() as world, world.post(COMPLETIONS, {**TOKENS, "user": "team-a"}) as answer:
        await answer.read()
        assert "vllm_xargs" not in world.one.received[0].fields
