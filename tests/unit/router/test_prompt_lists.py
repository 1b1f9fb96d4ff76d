"""Prompts in a list: each is answered as if it were alone."""

import pytest

from tests.unit.router.choices_client import (
    BODY,
    LONG,
    PROMPT,
    ask,
    stream,
    texts,
    texts_of,
)


@pytest.mark.parametrize(
    "prompts",
    [["the cat", "on the mat", "ran"], [[5, 6], [7, 8, 9], [10]], [LONG, PROMPT], ["a", [5]]],
)
async def test_each_of_several_prompts_is_answered_as_if_it_were_sent_alone(seeded, prompts):
    single = [await ask(seeded, prompt=prompt) for prompt in prompts]
    expected = [one["choices"][0]["text"] for one in single]
    assert len(set(expected)) > 1
    answer = await ask(seeded, prompt=prompts)
    assert texts(answer) == expected
    assert texts_of(await stream(seeded, prompt=prompts), len(prompts)) == expected
    for field in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert answer["usage"][field] == sum(one["usage"][field] for one in single)
    assert texts(await ask(seeded, prompt=prompts[:1])) == expected[:1]


async def test_a_bad_prompt_is_named_by_its_place_and_none_is_started(house):
    for prompts, param in [
        ([PROMPT, []], "prompt[1]"),
        (["a", ""], "prompt[1]"),
        ([PROMPT, [320]], "prompt[1]"),
        ([[5] * 600, PROMPT], "prompt[0]"),
    ]:
        response = await house.http.post("/v1/completions", json=BODY | {"prompt": prompts})
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] == param
    assert house.workers[0].submits == []


@pytest.mark.parametrize("streamed", [False, True])
async def test_every_choice_begins_with_the_text_of_its_own_prompt(seeded, streamed):
    prompts = ["the cat", "on the mat"]
    plain = texts(await ask(seeded, prompt=prompts, n=2))
    expected = [prompts[index // 2] + text for index, text in enumerate(plain)]
    if streamed:
        found = texts_of(await stream(seeded, prompt=prompts, n=2, echo=True), 4)
    else:
        found = texts(await ask(seeded, prompt=prompts, n=2, echo=True))
    assert found == expected
