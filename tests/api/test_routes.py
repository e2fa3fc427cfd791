"""Every other route, keys, request ids, and JSON for all that is refused."""

from __future__ import annotations

import re

import pytest
from api_fakes import Serve, Served, chat

from lumenbox.api.limits import Limits


async def test_models(box: Served) -> None:
    status, _, answer = await box.request("GET", "/v1/models")
    (entry,) = answer["data"]
    assert (status, answer["object"], entry["id"], entry["max_model_len"]) == (200, "list", "tiny", 2048)
    assert (await box.request("GET", "/v1/models/tiny"))[2] == entry
    status, _, answer = await box.request("GET", "/v1/models/other/one")
    assert (status, answer["error"]["code"]) == (404, "model_not_found")


async def test_tokens_there_and_back(box: Served) -> None:
    _, _, answer = await box.post("/tokenize", {"prompt": "hé", "return_token_strs": True, "model": "tiny"})
    assert answer["tokens"] == list("hé".encode()) and answer["count"] == 3 and answer["max_model_len"] == 2048
    assert answer["token_strs"][0] == "h"
    assert (await box.post("/detokenize", {"tokens": answer["tokens"]}))[2] == {"prompt": "hé"}
    assert (await box.post("/tokenize", {"messages": chat()["messages"]}))[2]["count"] == 8
    for path, body in (
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "x", "messages": []}),
        ("/detokenize", {"tokens": [999]}),
    ):
        assert (await box.post(path, body))[0] == 400
    assert (await box.post("/tokenize", {"prompt": "x", "add_special_tokens": False}))[0] == 400


@pytest.mark.parametrize(
    ("state", "workers", "health", "status"),
    [
        ("ready", ["ready", "dead"], 200, "ready"),
        ("degraded", ["ready", "suspect"], 200, "degraded"),
        ("degraded", ["suspect", "dead"], 503, "dead"),
        ("loading", ["loading", "loading"], 503, "loading"),
        ("draining", ["ready", "ready"], 503, "draining"),
        ("dead", ["quarantined"], 503, "dead"),
    ],
)
async def test_health(box: Served, state: str, workers: list[str], health: int, status: str) -> None:
    box.service.box_state, box.service.worker_states = state, workers
    code, _, answer = await box.request("GET", "/health")
    assert (code, answer["status"], [w["state"] for w in answer["workers"]]) == (health, status, workers)
    assert (await box.request("GET", "/ready"))[0] == health
    assert (await box.request("GET", "/live"))[0] == 200


async def test_documents(box: Served) -> None:
    assert (await box.request("GET", "/version"))[2]["version"]
    assert (await box.request("GET", "/lumenbox/state"))[2]["counters"]["generated_tokens"] == 99
    _, _, answer = await box.request("GET", "/openapi.json")
    assert answer["openapi"].startswith("3.1") and "ChatBody" in answer["components"]["schemas"]
    assert {resource.canonical for resource in box.server._runner.app.router.resources()} == set(answer["paths"])
    references = re.findall(r"'\$ref': '#/components/schemas/(\w+)'", str(answer))
    assert set(references) <= set(answer["components"]["schemas"])


async def test_refusals_of_the_router_are_json(box: Served) -> None:
    status, _, answer = await box.request("GET", "/v1/nope")
    assert (status, answer["error"]["code"]) == (404, "not_found")
    status, headers, answer = await box.request("GET", "/v1/chat/completions")
    assert (status, answer["error"]["code"], headers["Allow"]) == (405, "method_not_allowed", "POST")


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("application/json", 200), ("application/json; charset=utf-8", 200), ("application/problem+json", 200),
        ("text/plain", 415), ("application/x-www-form-urlencoded", 415), ("multipart/form-data; boundary=x", 415),
    ],
)  # fmt: skip
async def test_content_types(box: Served, kind: str, status: int) -> None:
    assert (await box.post("/v1/completions", b'{"prompt":"x"}', headers={"Content-Type": kind}))[0] == status


async def test_a_body_without_content_type(box: Served) -> None:
    client = await box.raw()
    client.writer.write(b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 14\r\n\r\n{"prompt":"x"}')
    assert (await client.head())[0] == 200
    client.close()


async def test_keys(serve: Serve) -> None:
    box = await serve(api_keys=("one", "zwei-ü"))
    for path in ("/health", "/live", "/ready"):
        assert (await box.request("GET", path))[0] == 200
    for path in ("/v1/models", "/metrics", "/lumenbox/state", "/version", "/openapi.json", "/nope"):
        status, _, answer = await box.request("GET", path)
        assert (status, answer["error"]["code"], answer["error"]["type"]) == (
            401,
            "invalid_api_key",
            "authentication_error",
        )
    for given, status in (
        ("Bearer one", 200),
        ("bearer zwei-ü", 200),
        ("Bearer on", 401),
        ("one", 401),
        ("Basic one", 401),
    ):
        assert (await box.request("GET", "/v1/models", headers={"Authorization": given}))[0] == status


async def test_request_ids(box: Served) -> None:
    assert (await box.request("GET", "/live", headers={"X-Request-Id": "mine-1"}))[1]["X-Request-Id"] == "mine-1"
    own = (await box.request("GET", "/nope", headers={"X-Request-Id": "x" * 129}))[1]["X-Request-Id"]
    assert own.startswith("req-")
    status, headers, _ = await box.post("/v1/chat/completions", chat(temperature=9))
    assert status == 400 and headers["X-Request-Id"]


async def test_a_bug_is_a_500_in_json_and_logged_once(box: Served, caplog: pytest.LogCaptureFixture) -> None:
    box.service.refuse = KeyError("secret-prompt")  # type: ignore[assignment]
    for _ in range(5):
        status, _, answer = await box.post("/v1/chat/completions", chat("secret-prompt"))
        assert (status, answer["error"]["code"]) == (500, "internal_error")
    assert len(caplog.records) == 1 and "KeyError" in caplog.text and "secret" not in caplog.text


async def test_refused_requests_leave_no_trace_in_the_log(box: Served, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    for body in (b"{", b'{"messages":[{"role":"user","content":"canary"}],"temperature":-5}'):
        assert (await box.post("/v1/chat/completions", body))[0] == 400
    assert not [record for record in caplog.records if record.name.startswith(("lumenbox", "aiohttp"))]


async def test_too_many_waiting_for_the_tokenizer(serve: Serve) -> None:
    box = await serve(Limits(max_tokenizing=0))
    status, headers, _ = await box.post("/v1/chat/completions", chat())
    assert (status, headers["Retry-After"]) == (429, "1")


async def test_metrics(box: Served) -> None:
    await box.post("/v1/chat/completions", chat(n=2))
    async with box.session.get(box.url + "/metrics") as response:
        page = await response.text()
        assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    figures = {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in page.splitlines() if line[0] != "#"}

    def figure(name: str, engine: str = "box", **labels: str) -> float:
        pairs = sorted({"engine": engine, "model_name": "tiny", **labels}.items())
        return figures[name + "{" + ",".join(f'{key}="{value}"' for key, value in pairs) + "}"]

    assert figure("vllm:num_requests_running", "0") == 1 and figure("vllm:num_requests_waiting", "1") == 2
    assert figure("vllm:kv_cache_usage_perc", "0") == 0.25
    assert figure("vllm:prompt_tokens_total") == 8 and figure("vllm:generation_tokens_total") == 99
    assert figure("vllm:request_success_total", finished_reason="stop") == 2
    assert figure("vllm:time_to_first_token_seconds_count") == 1
    assert figure("vllm:inter_token_latency_seconds_count") == 10
    assert figure("vllm:e2e_request_latency_seconds_count") == 1
    assert figure("lumenbox:worker_state", "1", state="dead") == 1
    assert figure("lumenbox:worker_failures_total", cause="exit") == 4
    assert figure("lumenbox:holder_bytes", "1") == 5120 and figure("lumenbox:checkpoint_evictions_total") == 3
    assert figure("lumenbox:holder_sealed_bytes_total", "0") == 7168
    assert figure("lumenbox:holder_restored_bytes_total", "0") == 2048
    for name in ("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total", "vllm:num_preemptions_total"):
        assert figure(name) >= 0
    for name in (
        *("recoveries_total", "recovery_stall_seconds", "recovery_phase_seconds", "recovered_tokens_total"),
        *("checkpoint_coverage", "checkpoint_lag_tokens", "holder_load_balance", "assist_acceptance"),
        "worker_respawn_seconds",
    ):
        assert f"lumenbox:{name}" in page
