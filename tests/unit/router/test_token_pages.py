"""`/tokenize` and `/detokenize`."""

from typing import Any

from tests.unit.router.message_examples import ASK, MAX_TOKENS, TOOLS
from tests.unit.router.test_http_errors import check_error


async def test_tokenize_and_detokenize(serve, chat_tokenizer):
    house = await serve("x")
    answer = await house.http.post("/tokenize", json={"model": "tiny", "prompt": "the cat"})
    ids = list(chat_tokenizer.encode("the cat"))
    expected: Any = {
        "count": len(ids),
        "max_model_len": MAX_TOKENS,
        "tokens": ids,
        "token_strs": None,
    }
    assert answer.json() == expected
    plain: Any = {"prompt": "the cat", "add_special_tokens": False}
    answer = await house.http.post("/tokenize", json=plain)
    assert answer.json()["tokens"] == ids[1:]
    answer = await house.http.post("/detokenize", json={"model": "tiny", "tokens": ids})
    assert answer.json() == {"prompt": "<bos>the cat"}
    assert house.workers[0].submits == []
    bad: Any = (
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": ASK}, "prompt"),
        ("/tokenize", {"prompt": "a", "tools": TOOLS}, "tools"),
        ("/tokenize", {"prompt": "a", "x": 1}, "x"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/detokenize", {"tokens": [320]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {}, "tokens"),
    )
    for path, body, param in bad:
        check_error(await house.http.post(path, json=body), 400, param, "invalid_value")
    long = {"prompt": "x" * 1_000_000}
    answer = await house.http.post("/tokenize", json=long)
    check_error(answer, 400, "prompt", "context_length_exceeded")
    answer = await house.http.post("/tokenize", json={"model": "other", "prompt": "a"})
    assert answer.status_code == 404


async def test_more_ids_than_any_sequence_can_have_are_not_read(house):
    most = house.app.dispatcher.core.max_model_tokens
    for num, status in ((most, 200), (most + 1, 400)):
        answer = await house.http.post("/detokenize", json={"tokens": [5] * num})
        assert answer.status_code == status
    assert answer.json()["error"]["param"] == "tokens"
    assert answer.json()["error"]["code"] == "context_length_exceeded"
