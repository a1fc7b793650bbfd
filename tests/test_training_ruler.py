"""The spread model's tokenizer is lossless, and its training data are worded as the evaluation."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest
import torch

from kvsketch.evaluation.inspection.retrieval import RECENT, SINK
from kvsketch.evaluation.runner.longeval_cases import generate_cases
from kvsketch.evaluation.tasks.haystack import filler
from kvsketch.evaluation.tasks.ruler import SUBTASKS, Ruler
from kvsketch.evaluation.tasks.ruler_words import all_words
from kvsketch.evaluation.tasks.sessions import Sessions
from kvsketch.hf.interface import watched
from training.ahead import Ahead
from training.data import CHAINS
from training.network import LeftOut, Muon, Shape, _either, build_model
from training.ruler_data import Mixture, Sequences
from training.ruler_documents import KINDS, Document, Documents
from training.ruler_tokenizer import build_tokenizer

TASKS = {
    "single": "niah_multikey_2",
    "values": "niah_multivalue",
    "queries": "niah_multiquery",
    "chains": "vt",
    "counts": "cwe",
}


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


@pytest.fixture(scope="module")
def sequences(tokenizer):
    return Sequences(tokenizer)


def ids_of(tokenizer, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def official(subtask: str, tokenizer) -> tuple[str, str]:
    task = Ruler([subtask], [2000], 1)
    task.haystack = filler()
    case = task.fitted(task.cases()[0], tokenizer, 4000)
    return case.context, case.question


def test_any_text_comes_back(tokenizer):
    rng = random.Random(0)
    texts = [
        "",
        " ",
        "\n\n",
        ".\n",
        "12345 1234567",
        "ABCDE ABc aB",
        "thethe the\tthe",
        "中文 é ß 🙂",
    ]
    texts += ["".join(chr(rng.randrange(1, 0xD7FF)) for _ in range(50)) for _ in range(20)]
    for text in texts:
        assert tokenizer.decode(ids_of(tokenizer, text)) == text


@pytest.mark.parametrize("subtask", SUBTASKS)
def test_a_prompt_comes_back_and_its_question_is_encoded_alike_with_and_without_it(
    subtask, tokenizer
):
    context, question = official(subtask, tokenizer)
    apart = ids_of(tokenizer, context) + ids_of(tokenizer, question)
    assert ids_of(tokenizer, context + question) == apart
    assert tokenizer.decode(apart) == context + question


def test_a_word_is_one_token_in_every_place(tokenizer):
    words = [word for word in all_words() if re.fullmatch("[a-z]+", word)]
    assert len(words) > 8000
    for word in words:
        (one,) = ids_of(tokenizer, word)
        for text in (
            f" {word}",
            f"-{word}",
            f"1. {word} 2. ",
            f"line {word}-x: REGISTER_CONTENT is <1>",
        ):
            assert one in ids_of(tokenizer, text)


def shape(text: str) -> str:
    """The wording of a text, with placeholders for names, words and numbers."""
    text = re.sub(r"\d+\. [a-z][a-z ñ-]*?(?= \d|\n|$)", "N. W", text)
    text = re.sub(r"\d+", "0", text)
    text = re.sub(r"(?<=for )[\w-]+-[\w-]+(?: [\w-]+)?(?= is: )", "KEY", text)
    text = re.sub(r"(?<=numbers for ).*?(?= mentioned)", "KEYS", text)
    text = re.sub(r"(?<=number for ).*?(?= mentioned)", "KEY", text)
    return re.sub(r"\b[A-Z]{5}\b", "NAME", re.sub(r"\b(?!VAR)[A-Z]{3}\b", "NAM", text))


def whole(document: Document) -> str:
    return "".join(part.text for part in document.before) + document.text


def made(kind: str, room: int, wanted: str) -> Document:
    """A document with a question of this kind, and its example where the evaluation has one."""
    documents, rng = Documents(), random.Random(1)
    while True:
        found = documents.make(kind, room, rng)
        if any(part.kind == wanted for part in found.questions[0]) and (
            found.before or wanted not in ("chains", "counts")
        ):
            return found


@pytest.mark.parametrize("wanted", TASKS)
def test_questions_and_texts_are_worded_as_the_evaluation_words_them(wanted, tokenizer):
    kind = "several" if wanted in ("values", "queries") else wanted
    document = made(kind, 2000, wanted)
    context, question = official(TASKS[wanted], tokenizer)
    assert shape(document.questions[0][0].text) == shape(question)
    expected, found = shape(context), shape(whole(document))
    if wanted in ("values", "queries", "single"):
        assert found.split("\n")[0] == expected.split("\n")[0]
        assert shape("One of the special magic numbers for a-b is: 1.") in found
        assert shape("One of the special magic numbers for a-b is: 1.") in expected
    elif wanted == "chains":
        # The lines are of the same kinds, and there are as many paragraphs.
        rest = [
            {line for line in text.split("\n") if not line.startswith("The ")}
            for text in (found, expected)
        ]
        assert rest[0] == rest[1]
        assert found.count("\n\n") == expected.count("\n\n")
    else:
        assert re.sub("(N. W ?)+", "LIST", found) == re.sub("(N. W ?)+", "LIST", expected)


def test_lines_are_the_official_prompt(sequences, tokenizer):
    document = sequences.documents.make("lines", 500, random.Random(0))
    prompt = generate_cases(10, 1, 0)[0]["prompt"]
    question = next(q for q in document.questions if "Tell me" in q[0].text)
    asked = document.text + question[0].text
    assert shape(asked).split("\n")[0] == shape(prompt).split("\n")[0]
    assert asked.rstrip(" ").endswith(prompt.rstrip()[-len("? I need the number.") :])
    key = re.search("in line (.*?)[?]", question[0].text)[1]
    told = "".join(part.text for part in question[1:])
    number = re.search(f"line {key}: REGISTER_CONTENT is <(.*?)>", document.text)[1]
    assert told.strip() == f"{number}."


@pytest.mark.parametrize("kind", KINDS)
def test_every_answer_is_in_the_text(kind, sequences):
    rng = random.Random(2)
    for _ in range(20):
        document = sequences.documents.make(kind, rng.randrange(100, 1500), rng, 0.1)
        for question in document.questions:
            for part in question:
                if part.kind:
                    assert re.sub("[>.]+$", "", part.text) in document.text


def test_lists_are_asked_for_as_in_a_session(sequences):
    """Keys in one order in the text and in another in the question, whose answer has that order."""
    (case,) = Sessions("list", [200], 1).cases()
    rng, most = random.Random(2), 0
    for _ in range(20):
        document = sequences.documents.make("list", rng.randrange(100, 1500), rng)
        assert document.head == case.context[: len(document.head)]
        for asked, *told in document.questions:
            keys = [part.text for part in told if part.kind == "next"]
            values = [part.text for part in told if part.kind == "listed"]
            assert keys == re.split(", and |, ", asked.text.split(" for ")[1].split(" men")[0])
            for key, value in zip(keys, values, strict=True):
                assert f"One of the special magic numbers for {key} is: {value}." in document.text
            answer = "".join(part.text for part in told)
            assert (
                answer
                == ",".join(f" {key} is: {value}" for key, value in zip(keys, values, strict=True))
                + "."
            )
            most = max(most, len(keys))
        assert shape(asked.text) in shape(case.context)
    assert most > 40


def test_first_names_of_chains_are_asked_for_by_their_value(sequences):
    rng = random.Random(2)
    for _ in range(20):
        document = sequences.documents.make("firsts", rng.randrange(100, 1500), rng)
        for asked, space, name in document.questions:
            value = re.findall(r"(?<= = )\d+$|(?<= value )\d+", asked.text)[-1]
            assert f"VAR {name.text} = {value}" in document.text
            assert (space.text, name.loss, name.kind in CHAINS) == (" ", True, True)


def test_a_batch_is_what_its_seed_says(sequences, tokenizer):
    mixture = Mixture(512, 8, echoes=0.2, bags=0.2, verbatim=0.3, gaps=0.5, span=4000)
    batch, again = (sequences.batch(mixture, np.random.default_rng(5)) for _ in range(2))
    assert (batch.ids == again.ids).all()
    assert (batch.positions == again.positions).all()
    assert batch.either == again.either
    assert batch.ids.shape == batch.loss.shape == batch.answer.shape == (8, 512)
    assert (np.diff(batch.positions) >= 1).all()
    assert batch.positions.max() < 4000
    assert set(batch.kinds.values()) <= {*TASKS, "firsts", "lines", "copies", "echoes", "bags"}
    for (row, column), ids in batch.either.items():
        assert batch.loss[row, column]
        assert batch.ids[row, column] in ids


def test_ids_are_those_of_their_text(sequences, tokenizer):
    batch = sequences.batch(Mixture(512, 16), np.random.default_rng(5))
    for row in batch.ids.tolist():
        assert row[0] == tokenizer.bos_token_id
        assert tokenizer.bos_token_id not in row[1:]
        for document in tokenizer.decode(row[1:]).split(tokenizer.eos_token)[:-1]:
            ids = ids_of(tokenizer, document)
            assert any(row[i : i + len(ids)] == ids for i in range(len(row)))


WIRED = Shape(layers=6, heads=8, kv_heads=4, wired=True)


def copied(model, tokenizer, words) -> float:
    """The share of repeated words that are among the ten likeliest."""
    begin = torch.full((len(words), 1), tokenizer.bos_token_id)
    ids = torch.cat([begin, words, words], 1)
    best = model(ids).logits[:, words.shape[1] + 1 : -1].topk(10).indices
    return (best == words[:, 1:, None]).any(-1).float().mean().item()


def test_wired_a_network_copies_what_stood_after_the_same_words_without_any_one_layer(tokenizer):
    torch.manual_seed(0)
    words = torch.randint(300, len(tokenizer), (4, 40))
    plain = build_model(tokenizer, Shape(layers=6, heads=8, kv_heads=4))
    assert copied(plain, tokenizer, words) < 0.05
    model = build_model(tokenizer, WIRED)
    assert copied(model, tokenizer, words) > 0.8
    for layer in range(1, 6):
        weight = model.model.layers[layer].self_attn.o_proj.weight
        saved = weight.data.clone()
        weight.data.zero_()
        assert copied(model, tokenizer, words) > 0.5
        weight.data = saved


def heads_there(model, ids, left_out) -> torch.Tensor:
    """bool [layers, rows, KV heads, query heads of each]: is the head's output not 0?"""
    return torch.stack(
        [o.unflatten(2, (4, 2)).abs().amax((1, 4)) > 0 for o in outputs(model, ids, left_out)]
    )


def outputs(model, ids, left_out) -> list[torch.Tensor]:
    """[rows, tokens, heads, head_dim] by layer."""
    seen = []

    def look(kernel, *args, **kwargs):
        out, weights = left_out(kernel, *args, **kwargs)
        seen.append(out.detach())
        return out, weights

    with watched(model, look):
        model(ids)
    return seen


def test_heads_and_layers_are_left_out_in_training_only(tokenizer):
    torch.manual_seed(0)
    model = build_model(tokenizer, Shape(layers=6, heads=8, kv_heads=4))
    left_out = LeftOut(model.config)
    ids = torch.randint(300, len(tokenizer), (200, 4))
    assert not left_out.draw(200, 0.2, 0.1).any()
    left_out.near[:] = False
    assert heads_there(model.eval(), ids, left_out).all()
    # A KV head (both its query heads) is there with probability .8 x .9, or in the first two layers
    # .8 x .8 x .9, a layer with .9: the bounds are five standard deviations of as many rows.
    there = heads_there(model.train(), ids, left_out)
    assert (there[..., 0] == there[..., 1]).all()
    heads, layers = there[..., 0].float(), there[..., 0].any(-1).float()
    assert abs(heads[2:].mean().item() - 0.72) < 5 * (0.72 * 0.28 / 800) ** 0.5
    assert abs(heads[:2].mean().item() - 0.576) < 5 * (0.576 * 0.424 / 400) ** 0.5
    left_out.draw(400, 0.05, 0.0)  # heads of the first two layers: .9 x .9 at least
    assert abs(left_out.keep[:2].float().mean().item() - 0.81) < 5 * (0.81 * 0.19 / 3200) ** 0.5
    assert abs(left_out.keep[2:].float().mean().item() - 0.95) < 5 * (0.95 * 0.05 / 6400) ** 0.5
    assert abs(layers[2:].mean().item() - 0.9 * (1 - 0.2**4)) < 5 * (0.09 / 800) ** 0.5


def test_some_sequences_have_too_few_heads_to_answer(tokenizer):
    torch.manual_seed(0)
    model = build_model(tokenizer, Shape(layers=6, heads=8, kv_heads=4))
    left_out = LeftOut(model.config)
    weak = torch.from_numpy(left_out.draw(400, 0.0, 0.0, few=0.25))
    assert abs(weak.float().mean().item() - 0.25) < 5 * (0.25 * 0.75 / 400) ** 0.5
    assert left_out.near[weak].all()
    strong = left_out.near[~weak].float()
    assert abs(strong.mean().item() - 0.5) < 5 * (0.25 / len(strong)) ** 0.5
    left_out.near[:] = False
    ids = torch.randint(300, len(tokenizer), (400, 4))
    there = heads_there(model.train(), ids, left_out)[..., 0]
    assert there[:, ~weak].all()
    assert there[:2].all()
    left = there[2:, weak].sum((0, 2))
    assert set(left.tolist()) <= set(range(11))  # the larger of two draws
    assert left.max() == 10
    assert abs(left.float().mean().item() - 70 / 11) < 5 * (2.5 / len(left) ** 0.5)
    assert there[2:, weak].any(1).all()  # every head, at times
    split = ((there[2:, weak].sum(2) % 4) > 0).sum(0)  # layers of which some heads stay
    assert 0.6 < (split <= 1).float().mean() < 0.95  # one layer after another, or few heads
    whole = there[2:, weak].all(2).float().mean(1)  # of the layers above the second
    assert whole[0] > 2 * whole[3]  # often from the lowest on
    assert whole[3] > 0.05
    for _ in range(20):
        assert not left_out.draw(1, 0.0, 0.0, few=1.0).any()
    weak = torch.from_numpy(left_out.draw(400, 0.5, 0.5, few=0.25))
    near = left_out.keep[:2]
    assert near[:, weak].all()
    assert not near[:, ~weak].all()


def test_heads_that_are_left_out_see_first_and_recent_tokens(tokenizer):
    torch.manual_seed(0)
    model = build_model(tokenizer, Shape(layers=3, heads=8, kv_heads=4)).train()
    left_out = LeftOut(model.config)
    left_out.draw(6, 0.5, 0.0)
    left_out.near = torch.tensor([True, False] * 3)
    own = torch.arange(300)[:, None]
    far = own - torch.arange(300)
    mask = (far >= 0) & ((far < RECENT) | (torch.arange(300) < SINK))
    seen = []

    def look(kernel, module, query, key, value, *args, **kwargs):
        exact, _ = kernel(module, query, key, value, *args, **kwargs)
        near, _ = kernel(module, query, key, value, mask[None, None].clone(), *args[1:], **kwargs)
        out, weights = left_out(kernel, module, query, key, value, *args, **kwargs)
        other = torch.where(left_out.near[:, None, None, None], near, 0) * (module.layer_idx > 1)
        keep = left_out.keep[module.layer_idx].repeat_interleave(2, 1)[:, None, :, None]
        seen.append((out, torch.where(keep, exact, other)))
        return out, weights

    with watched(model, look):
        model(torch.randint(300, len(tokenizer), (6, 300)))
    assert len(seen) == 3
    for out, reference in seen:
        torch.testing.assert_close(out, reference, atol=1e-6, rtol=1e-5)


def test_where_heads_are_too_few_the_answer_is_the_end(sequences, tokenizer):
    end = tokenizer.eos_token_id
    batch = sequences.batch(Mixture(512, 4, bags=0.3), np.random.default_rng(5))
    rows = np.array([True, False, True, False])
    found = batch.unanswered(rows, end)
    for row in (1, 3):
        for name in ("loss", "answer", "ids"):
            assert (getattr(found, name)[row] == getattr(batch, name)[row]).all()
        assert (found.wanted[row] == batch.ids[row]).all()
    for row in (0, 2):
        numbers = [-1 if batch.kinds.get(n) in CHAINS else n for n in batch.answer[row].tolist()]
        numbers = np.array(numbers)
        first = {int(n): int((numbers == n).argmax()) for n in set(numbers.tolist()) - {-1}}
        assert set(np.flatnonzero(found.loss[row])) == set(first.values())
        assert (found.wanted[row][found.loss[row]] == end).all()
        assert (found.answer[row] == -1).all()
    assert (found.ids == batch.ids).all()
    assert set(found.either) == {at for at in batch.either if at[0] in (1, 3)}


def test_muon_here_steps_as_torchs():
    """torch's iterates in bfloat16: 1% of a step."""
    torch.manual_seed(0)
    shapes = [(8, 16), (16, 8), (8, 16)]
    start = [torch.randn(shape) for shape in shapes]
    found = []
    for cls in (Muon, torch.optim.Muon):
        parameters = [torch.nn.Parameter(value.clone()) for value in start]
        optimizer = cls(parameters, lr=0.1, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
        generator = torch.Generator().manual_seed(1)
        for _ in range(3):
            for parameter in parameters:
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            optimizer.step()
        found.append(torch.cat([(p - s).flatten() for p, s in zip(parameters, start, strict=True)]))
    ours, theirs = found
    assert (ours - theirs).norm() < 0.02 * theirs.norm()


def test_where_several_tokens_are_right_their_probability_counts_together():
    logits = torch.randn(3, 7, generator=torch.Generator().manual_seed(0), requires_grad=True)
    targets = torch.tensor([1, 2, 3])
    wrong = logits.argmax(-1) != targets
    loss, found = _either(logits, targets, wrong, {1: [2, 4, 4, 6]})
    chances = logits.softmax(-1)
    expected = [chances[0, 1], chances[1, [2, 4, 6]].sum(), chances[2, 3]]
    assert torch.allclose(loss, -torch.stack(expected).log().mean())
    assert found[1].item() == (logits[1].argmax().item() not in (2, 4, 6))
    assert found[0] == wrong[0]


def test_tokens_after_the_next_one_are_predicted_within_an_answer(sequences, tokenizer):
    """The loss is that of a plain loop over answers, from the hidden state before their first and
    later tokens; rows in which several tokens are right do not count."""
    torch.manual_seed(0)
    model = build_model(tokenizer, Shape(layers=1, heads=2, kv_heads=1))
    ahead = Ahead(model.config.hidden_size)
    for one in ahead.maps:
        torch.nn.init.normal_(one.weight)
    mixture = Mixture(400, 4, bags=0.5, kinds=(1.0, 1.0, 0.0, 1.0, 0.0))
    batch = sequences.batch(mixture, np.random.default_rng(5))
    several = {row for row, _ in batch.either}
    assert 0 < len(several) < 4
    hidden = torch.randn(4, 400, model.config.hidden_size)
    losses = []
    for row in set(range(4)) - several:
        for at in range(399):
            for further, one in enumerate(ahead.maps, 1):
                later = at + 1 + further
                number = batch.answer[row, later] if later < 400 else -1
                if number >= 0 and number == batch.answer[row, at + 1]:
                    said = model.lm_head(one(hidden[row, at])).log_softmax(-1)
                    losses.append(-said[batch.ids[row, later]])
    assert len(losses) > 20
    torch.testing.assert_close(ahead.loss(model, hidden, batch), torch.stack(losses).mean())
    nothing = batch.unanswered(np.ones(4, dtype=bool), tokenizer.eos_token_id)
    assert ahead.loss(model, hidden, nothing) == 0
