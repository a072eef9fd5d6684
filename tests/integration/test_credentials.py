"""Credentials of clients over HTTP: scopes, errors in each API's form, and that nothing else names the tenant."""

import json
from typing import Any

import aiohttp
import pytest
from click.testing import CliRunner

from pointsman.primitives import InstanceId
from pointsman_ingress.main import main
from tests.support.api_keys import api_key, put_key
from tests.support.events import joined
from tests.support.ingress_world import CHAT, COMPLETIONS, TOKENS, IngressBench, world_with
from tests.support.oidc_issuer import SigningKey, running_issuer
from tests.support.waiting import eventually

MESSAGES = "/v1/messages"
MESSAGE = {"model": "m", "max_tokens": 3, "messages": [{"role": "user", "content": "hello"}]}
KEYS = {"sk-alice": "alice", "sk-bob": "bob"}
FOREIGN_NAMES = (
    "x-llm-d-inference-fairness-id",
    "x-session-id",
    "x-tenant",
    "x-pointsman-tenant",
    "x-forwarded-user",
    "openai-organization",
    "x-user-id",
)


async def refusal(world: IngressBench, path: str, body: Any, key: str) -> tuple[int, dict[str, Any]]:
    async with world.post(path, body, authorization=f"Bearer {key}") as answer:
        return answer.status, await answer.json()


async def test_no_header_and_no_field_names_another_tenant() -> None:
    async with world_with(keys=KEYS) as world:
        told = {name.replace("-", "_"): "bob" for name in FOREIGN_NAMES}
        body = {**TOKENS, "user": "bob", "metadata": {"user_id": "bob"}, "safety_identifier": "bob"}
        for shown in ({"authorization": "Bearer sk-alice"}, {"x_api_key": "sk-alice"}):
            async with world.post(COMPLETIONS, body, **told, **shown) as answer:
                assert answer.status == 200
        async with world.post(COMPLETIONS, body, x_api_key="sk-bob", authorization="Bearer sk-alice") as answer:
            assert answer.status == 200

        assert [asked.tenant for asked in world.scheduler.asked] == ["alice"] * 3
        assert len({asked.session for asked in world.scheduler.asked}) == 1
        async with world.post(COMPLETIONS, body, **told, x_api_key="sk-bob") as answer:
            assert answer.status == 200
        assert world.scheduler.asked[-1].tenant == "bob"
        assert world.scheduler.asked[-1].session != world.scheduler.asked[0].session


FOREIGN_PAGES = [
    {"sec-fetch-site": "cross-site", "origin": "https://evil.example"},
    {"sec-fetch-site": "same-site", "origin": "http://localhost:3000"},
    {"sec-fetch-site": "cross-site"},
    {"origin": "http://evil.example"},
    {"origin": "null"},
    {"origin": "http://evil.example:8080", "host": "evil.example:8080"},
    {"origin": "http://[evil", "host": "[evil"},
]
OTHERS = [
    {},
    {"host": "models.example"},
    {"sec-fetch-site": "same-origin", "origin": "https://models.example", "host": "127.0.0.1:1"},
    {"origin": "http://10.0.0.9:8080", "host": "10.0.0.9:8080"},
    {"origin": "http://localhost:8080", "host": "localhost:8080"},
]


def a_form() -> aiohttp.FormData:
    form = aiohttp.FormData({"model": "m"})
    form.add_field("file", b"RIFF", filename="a.wav", content_type="audio/wav")
    return form


async def test_without_credentials_pages_of_other_sites_are_refused_and_everybody_else_served() -> None:
    async with world_with() as world:
        audio, models, text = (f"{world.url}/v1/{path}" for path in ("audio/transcriptions", "models", "completions"))
        for page in FOREIGN_PAGES:
            for asking in (
                world.client.post(audio, data=a_form(), headers=page),
                world.client.post(text, json=TOKENS, headers=page),
                world.client.get(models, headers=page),
            ):
                async with asking as answer:
                    assert (answer.status, (await answer.json())["error"]["code"]) == (403, "cross_site"), page
        assert world.scheduler.asked == []
        for headers in OTHERS:
            async with world.client.post(world.url + COMPLETIONS, json=TOKENS, headers=headers) as answer:
                assert answer.status == 200, headers


async def test_with_a_key_a_page_of_any_site_is_served() -> None:
    async with world_with(keys=KEYS) as world:
        for page in FOREIGN_PAGES[:4]:
            headers = {"authorization": "Bearer sk-alice", **page}
            async with world.client.post(world.url + COMPLETIONS, json=TOKENS, headers=headers) as answer:
                assert answer.status == 200, page


PAGE, ASKS = "https://chat.example", {"access-control-request-method": "POST"}


@pytest.mark.parametrize("keys", [None, KEYS])
@pytest.mark.parametrize("allowed", [(PAGE,), ("https://other.example", PAGE), ("*",)])
@pytest.mark.parametrize("path", [COMPLETIONS, MESSAGES, "/v1/models"])
async def test_a_page_of_a_named_origin_may_ask_and_read_every_answer(
    keys: dict[str, str] | None, allowed: tuple[str, ...], path: str
) -> None:
    asked = {"access-control-request-headers": "authorization,content-type,x-stainless-lang"}
    page = {"origin": PAGE, "sec-fetch-site": "cross-site", "content-type": "application/json"}
    async with world_with(keys=keys, cors_origin=allowed) as world:
        async with world.client.options(world.url + path, headers={**page, **ASKS, **asked}) as preflight:
            assert (preflight.status, await preflight.read()) == (204, b"")
        for key in ("sk-alice", "sk-of-nobody"):
            method = "GET" if path == "/v1/models" else "POST"
            headers = {**page, "authorization": f"Bearer {key}"}
            async with world.client.request(method, world.url + path, json=TOKENS, headers=headers) as answer:
                assert answer.status != 403
                assert (answer.status == 401) == (keys is not None and key not in keys)
            assert answer.headers["access-control-allow-origin"] == ("*" if allowed == ("*",) else PAGE)
            assert answer.headers["access-control-expose-headers"] == "*"

    assert preflight.headers["access-control-allow-origin"] == ("*" if allowed == ("*",) else PAGE)
    assert preflight.headers["access-control-allow-headers"] == asked["access-control-request-headers"]
    assert "POST" in preflight.headers["access-control-allow-methods"]


@pytest.mark.parametrize(("allowed", "status"), [((), 405), (("https://other.example",), 400)])
async def test_a_page_of_no_named_origin_is_not_let_in(allowed: tuple[str, ...], status: int) -> None:
    async with world_with(cors_origin=allowed) as world:
        async with world.client.options(world.url + COMPLETIONS, headers={"origin": PAGE, **ASKS}) as preflight:
            assert preflight.status == status
        headers = {"origin": PAGE, "sec-fetch-site": "cross-site"}
        async with world.client.post(world.url + COMPLETIONS, json=TOKENS, headers=headers) as answer:
            assert (answer.status, (await answer.json())["error"]["code"]) == (403, "cross_site")
            assert "--cors-origin" in (await answer.json())["error"]["message"]

    for refused in (preflight, answer):
        assert "access-control-allow-origin" not in refused.headers


@pytest.mark.parametrize(
    "origin", ["chat.example", "https://chat.example/", "https://a,https://b", "", "https://u@chat"]
)
def test_what_is_no_origin_is_said_at_the_start(origin: str) -> None:
    said = CliRunner().invoke(main, ["--cors-origin", origin])

    assert said.exit_code == 2
    assert "is no origin" in said.output


async def test_scopes_are_kept_and_told_in_each_apis_form() -> None:
    async with world_with(keys=KEYS, tokenizer="builtin") as world:
        await put_key(world.broker.access, api_key("sk-models", "carol", models=["other-*"]))
        await put_key(world.broker.access, api_key("sk-paths", "carol", endpoints=[COMPLETIONS]))

        async def is_known() -> bool:
            return (await refusal(world, CHAT, MESSAGE, "sk-paths"))[0] == 403

        await eventually(is_known)
        no_chat = (await refusal(world, CHAT, MESSAGE, "sk-paths"))[1]["error"]
        no_message = (await refusal(world, MESSAGES, MESSAGE, "sk-paths"))[1]
        assert (no_chat["code"], no_chat["type"]) == ("endpoint_not_allowed", "permission_error")
        assert (no_message["type"], no_message["error"]["type"]) == ("error", "permission_error")

        answers = [
            await refusal(world, COMPLETIONS, {**TOKENS, "model": model}, "sk-models") for model in ("m", "nowhere", "")
        ]
        assert [status for status, _ in answers] == [403, 403, 403]
        assert {body["error"]["code"] for _, body in answers} == {"model_not_allowed"}
        assert answers[0][1]["error"]["message"].replace("'m'", "") == answers[1][1]["error"]["message"].replace(
            "'nowhere'", ""
        )
        status, unknown = await refusal(world, COMPLETIONS, {**TOKENS, "model": "other-1"}, "sk-models")
        assert (status, unknown["error"]["message"]) == (404, "The model 'other-1' does not exist.")

        assert world.scheduler.asked == []
        status, _ = await refusal(world, COMPLETIONS, TOKENS, "sk-paths")
        assert status == 200


async def test_models_out_of_scope_are_not_listed() -> None:
    async with world_with(keys={"sk-alice": "alice"}) as world:
        await put_key(world.broker.access, api_key("sk-some", "carol", models=["m-*"]))
        await world.log.append(joined(InstanceId("engine-3"), url=world.one.url, model="m-2", at=1.0))

        async def listed(key: str, path: str = "/v1/models") -> tuple[int, str]:
            async with world.client.get(world.url + path, headers={"authorization": f"Bearer {key}"}) as answer:
                return answer.status, await answer.text()

        async def is_known() -> bool:
            return (await listed("sk-some"))[0] == 200

        await eventually(is_known)
        assert json.loads((await listed("sk-some"))[1])["data"] == []
        assert "m" in (await listed("sk-alice"))[1]
        assert [(await listed("sk-some", f"/v1/models/{name}"))[0] for name in ("m", "nothing", "m-9")] == [
            403,
            403,
            404,
        ]
        assert (await listed("sk-alice", "/v1/models/m"))[0] == 200


async def test_an_ingress_that_has_not_read_the_keys_is_not_ready_and_says_503() -> None:
    async with world_with(keys=KEYS, log_answers=False) as world:
        assert not world.board.ready
        assert "api_keys" in world.board.missing_parts
        status, body = await refusal(world, COMPLETIONS, TOKENS, "sk-alice")
        assert (status, body["error"]["code"]) == (503, "credentials_unread")
        async with world.post(COMPLETIONS, TOKENS) as answer:
            assert answer.status == 401

        world.broker.reconnect()
        await eventually(lambda: world.board.ready)
        assert (await refusal(world, COMPLETIONS, TOKENS, "sk-alice"))[0] == 200
        world.broker.disconnect()
        assert (await refusal(world, COMPLETIONS, TOKENS, "nonsense"))[0] == 401


async def test_while_the_keys_cannot_be_read_the_last_copy_holds_and_readyz_says_so() -> None:
    async with world_with(keys=KEYS) as world:
        await eventually(lambda: world.board.ready)
        world.broker.disconnect()
        await eventually(lambda: "api_keys" in world.board.degraded_parts)

        assert "revoked keys wait" in world.board.degraded_parts["api_keys"]
        assert "api_keys" not in world.board.missing_parts
        assert (await refusal(world, COMPLETIONS, TOKENS, "sk-alice"))[0] == 200

        world.broker.reconnect()
        await eventually(lambda: "api_keys" not in world.board.degraded_parts)


@pytest.mark.parametrize("keys", [None, KEYS])
async def test_tokens_of_an_issuer_are_accepted_beside_keys_and_alone(keys: dict[str, str] | None) -> None:
    signing = SigningKey("k")
    async with running_issuer(signing) as issuer:
        oidc: dict[str, Any] = {"oidc_issuer": issuer.url, "oidc_audience": "pointsman", "oidc_tenant_claim": "org"}
        async with world_with(keys=keys, **oidc) as world:
            token = signing.token(iss=issuer.url, org="acme").decode()
            statuses = [
                (await refusal(world, COMPLETIONS, {**TOKENS, "user": "bob"}, sent))[0]
                for sent in (token, token[:-9] + "AAAAAAAAA", "sk-alice", "nonsense")
            ]

            assert statuses == [200, 401, 401 if keys is None else 200, 401]
            assert [asked.tenant for asked in world.scheduler.asked] == ["acme"] + ["alice"] * (keys is not None)
            assert all("authorization" not in received.headers for received in world.one.received)
