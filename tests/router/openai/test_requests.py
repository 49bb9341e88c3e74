"""What becomes of a client's body: pure, no sockets."""

import json

import pytest
from msgspec import Raw

from pdconn.router.openai.bodies import (
    RETURN_MODEL,
    decode_body,
    find_ticket,
    prefill_body,
    return_body,
    with_tokens,
)
from pdconn.router.openai.requests import Direct, Route, count_ids, parse_body
from pdconn.router.router_errors import BadBody

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
LEND = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def completion(**body):
    return parse_body(Route.COMPLETIONS, json.dumps({"prompt": "hi", **body}).encode())


def chat(**body):
    return parse_body(Route.CHAT, json.dumps({**CHAT, **body}).encode())


def test_prefill_gets_the_same_prompt_and_one_token():
    body = json.loads(prefill_body(completion(model="m", max_tokens=64, temperature=0.5)))
    assert body == {
        "prompt": "hi",
        "model": "m",
        "temperature": 0.5,
        "max_tokens": 1,
        "n": 1,
        "stream": False,
        "kv_transfer_params": LEND,
    }


def test_what_cannot_be_had_with_one_token_is_not_asked_of_prefill():
    asked = {
        "stream": True,
        "stream_options": {"include_usage": True},
        "min_tokens": 5,
        "best_of": 1,
        "logprobs": 3,
        "logprob_token_ids": [1],
        "return_token_ids": True,
    }
    body = json.loads(prefill_body(completion(**asked)))
    assert body == {
        "prompt": "hi",
        "max_tokens": 1,
        "n": 1,
        "stream": False,
        "kv_transfer_params": LEND,
    }
    assert "top_logprobs" not in json.loads(prefill_body(chat(logprobs=True, top_logprobs=2)))


def test_what_shapes_the_prompt_stays():
    shaping = {
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "tool_choice": "required",
        "chat_template_kwargs": {"enable_thinking": False},
        "response_format": {"type": "json_object"},
        "documents": [{"title": "t", "text": "x"}],
        "reasoning_effort": "low",
        "cache_salt": "s",
        "add_generation_prompt": True,
        "an_unknown_field": [1],
    }
    body = json.loads(prefill_body(chat(**shaping)))
    assert {name: body[name] for name in shaping} == shaping


def test_a_chat_is_limited_by_the_name_that_counts():
    body = json.loads(prefill_body(chat(max_completion_tokens=100)))
    assert (body["max_tokens"], body["max_completion_tokens"]) == (1, 1)
    assert "max_completion_tokens" not in json.loads(prefill_body(completion()))
    assert (
        json.loads(prefill_body(completion(max_completion_tokens=9)))["max_completion_tokens"] == 1
    )


def test_decode_gets_the_clients_values_and_the_ticket_unchanged():
    raw = b'{ "prompt" : "\\u00e9\xc3\xa9", "temperature": 1.50, "seed": 123456789012345678901 }'
    ticket = find_ticket(b'{"id": 1, "kv_transfer_params": {"x": [1, 2.50], "new": {"y": null}}}')
    request = parse_body(Route.COMPLETIONS, raw)
    assert decode_body(request, ticket) == (
        b'{"prompt":"\\u00e9\xc3\xa9","temperature":1.50,"seed":123456789012345678901,'
        b'"kv_transfer_params":{"x": [1, 2.50], "new": {"y": null}}}'
    )
    assert decode_body(request, None) is raw


def test_a_returned_ticket_names_no_model_and_computes_one_token_at_most():
    ticket = find_ticket(b'{"kv_transfer_params": {"x": 1}}')
    body = json.loads(return_body(completion(model="m", max_tokens=64, stream=True), ticket))
    assert body["model"] == RETURN_MODEL
    assert body["prompt"] == "hi"
    assert (body["max_tokens"], body["stream"]) == (1, False)
    assert body["kv_transfer_params"] == {"x": 1}


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"not json",
        b"[]",
        b'{"id": 1}',
        b'{"kv_transfer_params": null}',
        b'{"kv_transfer_params": { }}',
        b'{"kv_transfer_params": [1]}',
        b'{"kv_transfer_params": "x"}',
    ],
)
def test_an_answer_without_a_ticket_has_none(answer):
    assert find_ticket(answer) is None


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"prompt": ["a", "b"]}, Direct.SEVERAL_PROMPTS),
        ({"prompt": [[1, 2], [3]]}, Direct.SEVERAL_PROMPTS),
        ({"n": 2}, Direct.SEVERAL_CHOICES),
        ({"n": "2"}, Direct.SEVERAL_CHOICES),
        ({"use_beam_search": True}, Direct.BEAM_SEARCH),
        ({"echo": True}, Direct.PROMPT_LOGPROBS),
        ({"echo": "yes"}, Direct.PROMPT_LOGPROBS),
        ({"prompt_logprobs": 0}, Direct.PROMPT_LOGPROBS),
        ({"prompt_embeds": "AAAA"}, Direct.PROMPT_EMBEDS),
        ({"prompt_embeds": ["AAAA"], "prompt": None}, Direct.PROMPT_EMBEDS),
        ({"truncate_prompt_tokens": -1}, Direct.TRUNCATED_PROMPT),
    ],
)
def test_what_a_ticket_cannot_serve_goes_direct(body, reason):
    assert completion(**body).direct is reason


@pytest.mark.parametrize("num_blanks", [0, 1, 200])
def test_blanks_change_nothing(num_blanks):
    """A list of ids that begins with many was taken for several prompts, and never handed over."""
    blanks = b" " * num_blanks
    ids = b'{"prompt": [%s1, 2, 3], "logit_bias": {%s}}' % (blanks, blanks)
    assert parse_body(Route.COMPLETIONS, ids).direct is None
    texts = b'{"prompt": [%s"a", "b"]}' % blanks
    assert parse_body(Route.COMPLETIONS, texts).direct is Direct.SEVERAL_PROMPTS


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"prompt": ["one"]},
        {"prompt": [[1, 2, 3]]},
        {"prompt": [1, 2, 3]},
        {"prompt": []},
        {"n": 1},
        {"n": None},
        {"echo": False},
        {"echo": None},
        {"use_beam_search": False},
        {"prompt_logprobs": None},
        {"logprobs": 3},
        {"best_of": 3},
        {"kv_transfer_params": None},
        {"kv_transfer_params": {}},
        {"vllm_xargs": {"ngram_size": 1}},
        {"vllm_xargs": {}},
    ],
)
def test_one_prompt_with_one_answer_takes_a_ticket(body):
    assert completion(**body).direct is None


def test_token_ids_written_with_spaces_are_one_prompt():
    assert parse_body(Route.COMPLETIONS, b'{"prompt": [ \n\t1 , 2 ]}').direct is None
    several = parse_body(Route.COMPLETIONS, b'{"prompt": [ \n\t[1] , [2] ]}')
    assert several.direct is Direct.SEVERAL_PROMPTS


def test_a_chats_messages_are_one_prompt():
    assert chat(messages=[{"role": "system"}, {"role": "user"}]).direct is None


@pytest.mark.parametrize(
    ("route", "raw", "field", "seen"),
    [
        (Route.COMPLETIONS, b"", "body", "0 bytes that are not JSON"),
        (Route.COMPLETIONS, b"{", "body", "1 bytes that are not JSON"),
        (Route.COMPLETIONS, b'{"prompt": NaN}', "body", "not JSON"),
        (Route.COMPLETIONS, b'{"\xff": 1}', "body", "not JSON"),
        (Route.COMPLETIONS, b'{"a": ' + b"[" * 200_000 + b"}", "body", "not JSON"),
        (Route.COMPLETIONS, b"[1]", "body", "array"),
        (Route.COMPLETIONS, b'"x"', "body", "str"),
        (Route.COMPLETIONS, b'{"model": "m"}', "prompt", "nothing"),
        (Route.COMPLETIONS, b'{"prompt": null}', "prompt", "null"),
        (Route.COMPLETIONS, b'{"prompt": 5}', "prompt", "a number"),
        (Route.COMPLETIONS, b'{"prompt": {}}', "prompt", "an object"),
        (Route.CHAT, b'{"prompt": "x"}', "messages", "nothing"),
        (Route.CHAT, b'{"messages": "x"}', "messages", "a string"),
        (Route.CHAT, b'{"messages": true}', "messages", "true"),
    ],
)
def test_a_body_without_sense_is_refused_by_field_and_value(route, raw, field, seen):
    with pytest.raises(BadBody) as caught:
        parse_body(route, raw)
    assert caught.value.param == field
    assert seen in str(caught.value)
    assert "expected" in str(caught.value)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"kv_transfer_params": {"remote_block_ids": [[1]]}}, "kv_transfer_params"),
        ({"kv_transfer_params": [1]}, "kv_transfer_params"),
        ({"ec_transfer_params": {"x": 1}}, "ec_transfer_params"),
        ({"vllm_xargs": {"kv_transfer_params": "x"}}, "vllm_xargs.kv_transfer_params"),
        ({"vllm_xargs": {"ec_transfer_params": {}}}, "vllm_xargs.ec_transfer_params"),
        ({"n": 2, "kv_transfer_params": {"a": 1}}, "kv_transfer_params"),
    ],
)
def test_a_client_cannot_name_blocks(body, field):
    with pytest.raises(BadBody, match="clients may not") as caught:
        completion(**body)
    assert caught.value.param == field


def test_a_field_name_in_disguise_is_seen():
    with pytest.raises(BadBody, match="clients may not"):
        parse_body(Route.COMPLETIONS, b'{"prompt": "x", "kv_transfer\\u005fparams": {"a": 1}}')


def test_an_empty_ticket_from_the_client_is_replaced_not_doubled():
    ticket = find_ticket(b'{"kv_transfer_params": {"x": 1}}')
    body = decode_body(completion(kv_transfer_params={}), ticket)
    assert body.count(b"kv_transfer_params") == 1
    assert json.loads(body)["kv_transfer_params"] == {"x": 1}


def test_prefill_is_asked_for_the_tokens_of_chats_only_and_only_if_they_are_wanted() -> None:
    wanted = [prefill_body(one, returns_tokens=True) for one in (chat(), completion())]
    assert [json.loads(body).get("return_token_ids") for body in wanted] == [True, None]
    assert "return_token_ids" not in json.loads(prefill_body(chat(return_token_ids=True)))


def test_tokens_stand_beside_a_ticket_whose_other_fields_stay_as_prefill_wrote_them() -> None:
    ticket = Raw(b'{"x": [1, 2.50], "new": {"y": null}}')
    made = bytes(with_tokens(ticket, b'{"prompt_token_ids": [5, 6], "usage": 1}'))
    assert json.loads(made) == {"x": [1, 2.5], "new": {"y": None}, "prompt_token_ids": [5, 6]}
    assert b"[1, 2.50]" in made


@pytest.mark.parametrize("answer", [b"{}", b'{"prompt_token_ids": null}'])
def test_without_tokens_the_ticket_stays_as_it_is(answer: bytes) -> None:
    ticket = Raw(b'{"x":  1}')
    assert with_tokens(ticket, answer) is ticket


@pytest.mark.parametrize(
    ("prompt", "num_ids"),
    [
        (b"[]", 0), (b"[ ]", 0), (b"[\n]", 0), (b"[[]]", 0), (b"[1]", 1), (b"[ 1 ,\t2 ]", 2),
        (b"[[1, 2], [3]]", 3), (b"[[], [1]]", 1), (b'["1"]', None), (b"1", None), (b"[-1]", None),
    ],
)  # fmt: skip
def test_ids_of_a_prompt_are_counted_unread(prompt: bytes, num_ids: int | None) -> None:
    assert count_ids(memoryview(prompt)) == num_ids
