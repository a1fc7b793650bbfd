"""kvsketch.prefill: a context is read once or twice before it is compressed."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from transformers import AutoTokenizer, DynamicCache

import kvsketch
import tiny_models
from families import CONFIGS, build
from kvsketch import InputError, SketchCache, Slots, UnsupportedError
from kvsketch.evaluation.runner.loading import resolve_model
from kvsketch.hf import parts
from kvsketch.hf.interface import watched
from kvsketch.hf.layer import SketchLayer
from kvsketch.hf.second_reading import Reading
from kvsketch.methods import registry
from kvsketch.methods.registry import ALL_METHODS
from model_sweep import Letters
from tiny_model import small_llama


@pytest.fixture(scope="module")
def llama():
    return small_llama().eval()


def ids_of(rows, tokens, seed=0):
    return torch.randint(3, 90, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def answer(model, ids, cache, new=8, **settings):
    return model.generate(
        ids, past_key_values=cache, max_new_tokens=new, do_sample=False, eos_token_id=None,
        pad_token_id=0, **settings,
    )[:, ids.shape[1] :]  # fmt: skip


REREADING = [("heavy_merge", "global"), ("heavy_merge", "measured"), ("heavy_merge", "layer"),
             ("snapkv", "global"), ("h2o", "even"), ("kvzip", "global"), ("kvzip", "layer"),
             ("kvzip_plus", "global"), ("kvgrad", "global"), ("kvgrad", "layer"),
             ("pyramidkv", None), ("uniform", "even")]  # fmt: skip


@pytest.mark.parametrize("chunk_size", [None, 64])
@pytest.mark.parametrize("method", ["heavy_merge", "snapkv", "h2o", "kcenter"])
def test_with_the_prompts_queries_it_is_the_prefill_of_generate(llama, method, chunk_size):
    ids = ids_of(1, 300)
    read, plain = (SketchCache(llama.config, method, budget=0.3, bits=16) for _ in range(2))
    kvsketch.prefill(llama, ids[:, :290], read, chunk_size=chunk_size)
    with torch.no_grad():
        llama(ids[:, :290], past_key_values=plain)
    assert read.summary()["slots"] == plain.summary()["slots"] < 100
    torch.testing.assert_close(answer(llama, ids, read), answer(llama, ids, plain), rtol=0, atol=0)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("family", CONFIGS)
def test_a_second_reading_leaves_nothing_behind(family, padded):
    """After a second reading a cache with room for all answers as an uncompressed one, and its
    length is the context's."""
    model = build(family)
    ids, mask = ids_of(2, 120), torch.ones(2, 120, dtype=torch.int64)
    if padded:
        ids[1, :9] = mask[1, :9] = 0
    expected = answer(model, ids, DynamicCache(config=model.config), attention_mask=mask)
    for queries in ("reread", "sample", ["which is it?", "and where?"]):
        cache = SketchCache(model.config, budget=200)
        kvsketch.prefill(
            model, ids[:, :100], cache, queries=queries, tokenizer=Letters(),
            attention_mask=mask[:, :100],
        )  # fmt: skip
        assert cache.get_seq_length() == 100
        assert torch.equal(answer(model, ids, cache, attention_mask=mask), expected)


@pytest.mark.parametrize(("method", "allocation"), REREADING)
def test_every_method_that_can_goes_by_a_second_reading(llama, method, allocation):
    ids = ids_of(2, 220, seed=1)
    mask = torch.ones_like(ids)
    mask[1, :30] = 0
    # Padded rows take another kernel, whose rounding decides which of two merges comes first where
    # nearly all tokens become a few slots, and with seed 0 which head gets the last slot.
    options = {"share": 0.25} if method == "heavy_merge" else {}
    asked = {"budget": 0.25, "allocation": allocation, "bits": 16, "options": options}
    cache = SketchCache(llama.config, method, **asked)
    kvsketch.prefill(
        llama, ids[:, :200], cache, queries="reread", tokenizer=Letters(),
        attention_mask=mask[:, :200],
    )  # fmt: skip
    summary = cache.summary()
    assert summary["slots"] == pytest.approx(50, rel=0.03)
    assert all(x is not None and 0 <= x < 3 for row in cache.error() for x in row["prompt"])
    alone = SketchCache(llama.config, method, **asked)
    kvsketch.prefill(llama, ids[:1, :200], alone, queries="reread", tokenizer=Letters())
    together = answer(llama, ids, cache, attention_mask=mask)
    assert torch.equal(together[:1], answer(llama, ids[:1], alone))


@pytest.mark.parametrize("part", [2048, 80])
@pytest.mark.parametrize("method", ["kvzip", "kvzip_plus", "kvgrad"])
def test_kvzip_scores_are_those_of_a_plain_computation(llama, monkeypatch, method, part):
    """The tokens kept are those of the highest scores of a plain computation: from queries, keys
    and values of transformers' own attention over an uncompressed cache, the hidden states before
    it and the gradients with respect to its outputs."""
    monkeypatch.setattr(parts, "PART", part)
    kvgrad = ALL_METHODS["kvgrad"]
    monkeypatch.setattr(kvgrad, "requires", replace(kvgrad.requires, part=part))
    n, seen, plain = 200, {}, DynamicCache()
    ids = ids_of(1, n)
    hidden, outputs = {}, {}
    llama = copy.deepcopy(llama)
    for layer in llama.model.layers:  # else all hidden states would have the same norm
        layer.input_layernorm.weight.data *= torch.linspace(0.1, 1, 64)

    def around(kernel, module, query, key, value, *args, **kwargs):
        seen[module.layer_idx] = query.detach(), key.detach(), value.detach()
        return kernel(module, query, key, value, *args, **kwargs)

    def weighs_of(again):
        """The weight of every query of the second reading, in both layers."""
        hooks = []
        for i, layer in enumerate(llama.model.layers):
            for into, part in ((hidden, layer.input_layernorm), (outputs, layer.self_attn)):

                def save(module, args, out, into=into, i=i):
                    into[i] = out[0] if isinstance(out, tuple) else out

                hooks.append(part.register_forward_hook(save))
        hooks.append(layer.register_forward_hook(lambda m, a, out: outputs.update(end=out)))
        with torch.enable_grad(), watched(llama, around):
            ids = llama.model.embed_tokens(again).detach().requires_grad_(True)
            llama.model(inputs_embeds=ids, past_key_values=copy.deepcopy(plain))
            end = outputs.pop("end").square().sum()
            grads = torch.autograd.grad(end, [outputs[i] for i in range(2)])
        for hook in hooks:
            hook.remove()
        if method == "kvzip_plus":
            return [1 / hidden[i].norm(dim=-1) for i in range(2)]
        if method == "kvgrad":
            return [grad.norm(dim=-1) for grad in grads]
        return [torch.ones(1, again.shape[1])] * 2

    with torch.no_grad():
        llama(ids, past_key_values=plain)
    scores = torch.zeros(2, 4, n)
    for start in range(0, n, part):
        end = min(start + part, n)
        asked = parts.REPEAT_PART if start else parts.REPEAT
        ends = ids[:, max(0, start - 8) : start]
        texts = [torch.tensor([Letters()(text)["input_ids"]]) for text in (asked, "\n")]
        again = torch.cat([texts[0], ends, texts[1], ids[:, start:end]], dim=1)
        weighs = weighs_of(again)
        q, first = again.shape[1], min(4, start)
        for number in range(2):
            query, key, value = seen[number]
            keys = torch.cat([key[:, :, :first], key[:, :, start:end], key[:, :, n:]], dim=2)
            logits = query @ keys.repeat_interleave(2, dim=1).mT * query.shape[-1] ** -0.5
            later = torch.ones(q, keys.shape[2], dtype=torch.bool).triu(keys.shape[2] - q + 1)
            share = logits.masked_fill(later, -torch.inf).softmax(-1)[..., first:]
            share = share[..., : end - start] * weighs[number].detach().view(1, 1, -1, 1)
            if method != "kvzip":
                weight = llama.model.layers[number].self_attn.o_proj.weight.detach()
                weight = weight.T.view(1, 8, -1, weight.shape[0])
                values = value[:, :, start:end].repeat_interleave(2, dim=1)
                share = share * (values @ weight).norm(dim=-1).unsqueeze(2)
            largest = share.amax(2).view(1, 4, 2, -1).amax(2)
            scores[number, :, start:end] = largest[0]
    scores[..., :4] = torch.inf
    wanted = torch.zeros(scores.numel(), dtype=torch.bool)
    wanted[scores.flatten().topk(round(0.2 * scores.numel())).indices] = True
    cache = SketchCache(llama.config, method, budget=0.2, recent=0, keep=["positions"])
    kvsketch.prefill(llama, ids, cache, queries="reread", tokenizer=Letters())
    for number, layer in enumerate(cache.layers):
        slots = layer.stream.slots
        for head in range(4):
            live = slots.masses()[0, head] > 0
            found = slots.positions[0, head][live].long()
            assert torch.equal(found, wanted.view(scores.shape)[number, head].nonzero().flatten())


@pytest.mark.parametrize("model_type", ["gemma3_text", "qwen3_next", "falcon_h1"])
def test_every_part_of_a_second_reading_follows_the_context(model_type, monkeypatch):
    """With windows and states, too, whose tokens the part before has changed: the queries are those
    of transformers' own attention over an uncompressed cache."""
    monkeypatch.setattr(parts, "PART", 30)
    model, ids, seen, found = tiny_models.build(model_type), ids_of(1, 90), {}, []
    ask = Reading.ask

    def asked(self, layer, observed):
        found.append(observed.queries)
        ask(self, layer, observed)

    monkeypatch.setattr(Reading, "ask", asked)
    cache = SketchCache(model.config, "kvzip", budget=0.5)
    kvsketch.prefill(model, ids, cache, queries="reread", tokenizer=Letters())
    full = [i for i, layer in enumerate(cache.layers) if isinstance(layer, SketchLayer)]

    def around(kernel, module, query, *args, **kwargs):
        seen.setdefault(module.layer_idx, query)
        return kernel(module, query, *args, **kwargs)

    context, expected = DynamicCache(config=model.config), []
    with torch.no_grad():
        model(ids, past_key_values=context)
        for part in parts.parts_of("reread", Letters(), ids, torch.ones_like(ids), 30):
            seen.clear()
            with watched(model, around):
                model(part.ids, past_key_values=copy.deepcopy(context))
            expected += [seen[i] for i in full]
    assert len(found) == len(expected) == 3 * len(full)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_questions_that_are_given_are_what_is_kept_for(llama):
    """The answer to a given question has a smaller error than without the question."""
    ids = ids_of(1, 300)
    questions = ["which one is it?", "and where?"]
    errors = {}
    for queries in ("prompt", questions):
        cache = SketchCache(llama.config, "snapkv", budget=0.2, allocation="even", recent=4)
        kvsketch.prefill(llama, ids, cache, queries=queries, tokenizer=Letters())
        exact = DynamicCache()
        with torch.no_grad():
            llama(ids, past_key_values=exact)
            asked = torch.tensor([Letters()("which one is it?")["input_ids"]])
            outs = [llama(asked, past_key_values=c).logits for c in (cache, exact)]
        errors[str(queries)] = float((outs[0] - outs[1]).norm() / outs[1].norm())
    assert errors[str(questions)] < errors["prompt"]


@pytest.mark.slow
def test_a_retrieval_head_is_found_by_the_second_reading():
    """From a fifth of the slots, in 8 bits, the packaged model answers four questions about records
    of 100 lines after a second reading, and after one by its own queries, asked again; and fewer
    where scores are of the prompt's last queries."""
    from transformers import AutoModelForCausalLM

    from kvsketch.evaluation.runner.longeval import QUESTION_MARK, read_answer
    from kvsketch.evaluation.runner.longeval_cases import generate_cases

    folder = resolve_model("longeval-one-head")
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ways = {"reread": "heavy_merge", "prompt": "heavy_merge", "last": "snapkv"}
    right = dict.fromkeys(ways, 0)
    for case in generate_cases(100, 4, seed=11):
        ids = tokenizer(case["prompt"], return_tensors="pt").input_ids
        cut = case["prompt"].rfind(QUESTION_MARK)
        context = tokenizer(case["prompt"][:cut], return_tensors="pt").input_ids
        for way, method in ways.items():
            cache = SketchCache(model.config, method, budget=0.2, bits=8, allocation="global")
            queries = "prompt" if way == "last" else way
            kvsketch.prefill(model, context, cache, queries=queries, tokenizer=tokenizer)
            text = tokenizer.decode(answer(model, ids, cache, new=16)[0])
            right[way] += read_answer(text) == int(case["expected_number"])
    assert right["reread"] == right["prompt"] == 4 > right["last"]


@pytest.mark.parametrize("method", registry.REREADING)
def test_kvzip_without_a_second_reading_is_refused_before_the_first_token(llama, method):
    cache = SketchCache(llama.config, method, budget=0.3)
    with pytest.raises(UnsupportedError, match=r"kvsketch\.prefill"):
        answer(llama, ids_of(1, 50), cache)
    assert cache.get_seq_length() == 0
    with pytest.raises(UnsupportedError, match=r"kvsketch\.prefill"):
        kvsketch.prefill(llama, ids_of(1, 50), cache)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"queries": "twice"}, "queries='twice' must be one of prompt, reread"),
        ({"queries": []}, "at least one"),
        ({"queries": [""]}, "none empty"),
        ({"queries": "reread", "tokenizer": None}, "needs tokenizer="),
        ({"ids": torch.zeros(1, 0, dtype=torch.int64)}, "the context is empty"),
        ({"ids": torch.zeros(3, dtype=torch.int64)}, r"must be int64 \[batch, tokens\]"),
        ({"ids": torch.zeros(1, 3)}, r"must be int64 \[batch, tokens\]"),
        ({"ids": ids_of(1, 700), "queries": "reread"}, "second reading would end at position"),
        ({"attention_mask": torch.ones(1, 3)}, "must be of the shape of input_ids"),
        ({"chunk_size": 0}, "chunk_size=0 must be an int >= 1"),
        ({"cache": DynamicCache()}, "cache must be a SketchCache"),
    ],
)
def test_bad_arguments_are_named_and_change_nothing(llama, arguments, message):
    cache = arguments.pop("cache", SketchCache(llama.config, budget=0.3))
    given = {"tokenizer": Letters()} | arguments
    with pytest.raises(InputError, match=message):
        kvsketch.prefill(llama, given.pop("ids", ids_of(1, 40)), cache, **given)
    assert cache.get_seq_length() == 0


def test_a_streaming_cache_is_refused(llama):
    cache = SketchCache(llama.config, budget=60, prefill="streaming")
    with pytest.raises(InputError, match="prefill='streaming'"):
        kvsketch.prefill(llama, ids_of(1, 40), cache)


def test_a_cache_in_use_is_refused(llama):
    cache = SketchCache(llama.config, budget=0.3)
    kvsketch.prefill(llama, ids_of(1, 40), cache)
    with pytest.raises(InputError, match="holds 40 tokens already"):
        kvsketch.prefill(llama, ids_of(1, 40), cache)


@pytest.mark.parametrize("method", ["tova", "expected_attention", "observed_attention", "subgen"])
def test_methods_that_cannot_use_a_second_reading_say_so(llama, method):
    cache = SketchCache(llama.config, method, budget=0.5)
    with pytest.raises(UnsupportedError, match=f"{method}.* second reading"):
        kvsketch.prefill(llama, ids_of(1, 40), cache, queries="reread", tokenizer=Letters())
    assert cache.get_seq_length() == 0


def test_gradients_through_a_state_are_refused():
    model = tiny_models.build("qwen3_next")
    cache = SketchCache(model.config, "kvgrad", budget=0.5)
    with pytest.raises(UnsupportedError, match=r"kvgrad.*state of a LinearAttentionLayer"):
        kvsketch.prefill(model, ids_of(1, 40), cache, queries="reread", tokenizer=Letters())
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize("allocation", ["layer", "global"])
@pytest.mark.parametrize("method", ["kcenter", "streaming_llm", "subgen"])
def test_need_is_told_by_scores(llama, method, allocation):
    with pytest.raises(InputError, match="compares scores"):
        SketchCache(llama.config, method, budget=0.5, allocation=allocation)


def test_an_interrupted_reading_leaves_an_empty_cache(llama):
    cache = SketchCache(llama.config, budget=0.3)

    class Breaking(Letters):
        pass

    hook = llama.model.layers[1].register_forward_pre_hook(
        lambda *_: (_ for _ in ()).throw(KeyboardInterrupt())
    )
    try:
        with pytest.raises(KeyboardInterrupt):
            kvsketch.prefill(llama, ids_of(1, 40), cache, queries="reread", tokenizer=Breaking())
    finally:
        hook.remove()
    assert cache.get_seq_length() == 0
    kvsketch.prefill(llama, ids_of(1, 40), cache)
    assert cache.get_seq_length() == 40


def test_queries_after_all_slots_see_every_one():
    from kvsketch import Observed
    from kvsketch.estimator import attention_received

    generator = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 1, 2, 30, 8, generator=generator, dtype=torch.float64)
    queries = torch.randn(1, 4, 50, 8, generator=generator, dtype=torch.float64)
    share = (queries.view(1, 2, 2, 50, 8) @ keys.unsqueeze(2).mT * 0.3).softmax(-1)
    observed = Observed(queries, 0.3, after=True)
    slots = Slots(keys, values)
    received = attention_received(slots, observed)
    torch.testing.assert_close(received.double(), share.sum((2, 3)), rtol=1e-5, atol=1e-6)
    largest = attention_received(slots, observed, largest=True)
    torch.testing.assert_close(largest.double(), share.amax((2, 3)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("method", ["kvzip", "heavy_merge", "snapkv", "h2o"])
def test_of_several_questions_all_count(method):
    """All questions count in any order: by the largest attention or by the sum, as the method has
    it."""
    from kvsketch import Observed
    from kvsketch.cache import windowed
    from kvsketch.cache.stream import Stream

    generator = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 1, 2, 50, 8, generator=generator)
    asked = [torch.randn(3, 1, 2, 6, 8, generator=generator) for _ in range(2)]

    def scores(order):
        stream = Stream(windowed(method), None)
        stream.extend(Slots(keys, values))
        for new_keys, new_values, queries in (asked[i] for i in order):
            stream.extend(Slots(new_keys, new_values))
            stream.ask(Observed(3 * queries, 0.3), slice(0, 50), 6)
        return stream.slots.score

    one, other, both, turned = map(scores, ([0], [1], [0, 1], [1, 0]))
    together = torch.maximum(one, other) if method in ("kvzip", "heavy_merge") else one + other
    torch.testing.assert_close(both, together)
    torch.testing.assert_close(turned, together)


def test_within_a_layer_every_head_has_its_safeguard():
    model = small_llama().eval()
    for layer in model.model.layers:  # the values of the first head are next to nothing
        layer.self_attn.v_proj.weight.data[:8] *= 1e-4
    held = {}
    for allocation in ("layer", "global"):
        goal = {"budget": 60, "allocation": allocation, "bits": 16}
        cache = SketchCache(model.config, **goal, sink=2, recent=2)
        kvsketch.prefill(model, ids_of(1, 600), cache)
        held[allocation] = [layer.stream.held[0, 0].item() for layer in cache.layers]
    assert held["layer"] == [12, 12]  # AdaKV's safeguard: 0.2 of the budget
    assert held["global"] == [4, 4]  # only sinks and the recent window


@pytest.mark.parametrize("budget", [0.3, 500])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_gradients_leave_the_model_and_the_cache_as_they_were(mode, budget):
    """A second reading that needs gradients leaves parameters, their ``requires_grad``, the mode it
    is called in and the hooks unchanged."""
    model = small_llama().eval()
    frozen = model.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
    before = {name: p.clone() for name, p in model.named_parameters()}
    cache = SketchCache(model.config, "kvgrad", budget=budget)
    with mode():
        grad = torch.is_grad_enabled()
        kvsketch.prefill(model, ids_of(1, 150), cache, queries="reread", tokenizer=Letters())
        assert torch.is_grad_enabled() == grad
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name])
        assert parameter.grad is None
        assert parameter.requires_grad == (parameter is not frozen)
    for layer in cache.layers:
        assert not any(t.requires_grad for t in layer.tensors())
        assert not layer.module()._forward_hooks
        assert not layer.module()._forward_pre_hooks
    assert answer(model, ids_of(1, 160), cache).shape == (1, 8)


@pytest.mark.parametrize("method", ["kvzip_plus", "kvgrad"])
@pytest.mark.parametrize(
    ("family", "attention"),
    [(f, None) for f in CONFIGS if f not in ("gemma2", "gemma3")] + [("llama", "eager")],
)
def test_a_weighed_reading_of_every_family(family, attention, method):
    """The rows of a padded batch keep the same keys as alone."""
    model = build(family, attention)
    if family != "mpt" and attention is None:  # their masks turn padding into NaN in float64
        model = model.double()
    ids = ids_of(3, 90)
    mask = torch.ones_like(ids)
    mask[0, :20] = 0
    found = []
    for rows in ([0, 1, 2], [0], [2]):
        cache = SketchCache(model.config, method, budget=0.4, sink=2, recent=4)
        kvsketch.prefill(
            model, ids[rows], cache, queries="reread", tokenizer=Letters(),
            attention_mask=mask[rows],
        )  # fmt: skip
        found.append([layer.stream.slots for layer in cache.layers])
    for whole, first, last in zip(*found, strict=True):
        for row, alone in ((0, first), (2, last)):
            for head in range(whole.keys.shape[1]):
                mine, theirs = (
                    s.keys[r, head][s.masses()[r, head] > 0] for s, r in ((whole, row), (alone, 0))
                )
                torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


def test_weights_go_with_their_queries():
    from kvsketch import Observed

    queries, weights = torch.arange(24.0).view(2, 1, 12, 1), torch.arange(24.0).view(2, 12)
    observed = Observed(queries, 1.0, after=True, weights=weights)
    for part in (observed.narrow(3, 5), observed.every(1, 4), observed.map_batch(lambda t: t[1:])):
        assert torch.equal(part.weights, part.queries[:, 0, :, 0])


def test_what_a_query_gives_is_weighed_before_the_largest_is_taken(monkeypatch):
    from kvsketch import Observed
    from kvsketch import estimator as module
    from kvsketch.estimator import attention_received

    monkeypatch.setattr(module, "_BLOCK_SCORES", 300)  # computes few queries and heads at a time
    monkeypatch.setattr(module, "_FEW_QUERIES", 2)
    g = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 2, 3, 20, 8, generator=g)
    queries, weights = torch.randn(2, 6, 9, 8, generator=g), torch.rand(2, 9, generator=g)
    factors = torch.rand(2, 3, 2, 20, generator=g)
    for after in (True, False):
        observed = Observed(queries, 0.3, after=after)
        logits = queries.view(2, 3, 2, 9, 8) @ keys.unsqueeze(2).mT * 0.3
        if not after:
            later = torch.ones(9, 20, dtype=torch.bool).triu(12)
            logits = logits.masked_fill(later, -torch.inf)
        share = logits.softmax(-1) * weights.view(2, 1, 1, 9, 1) * factors.unsqueeze(3)
        found = attention_received(Slots(keys, values), observed, weights, True, factors)
        torch.testing.assert_close(found, share.amax((2, 3)))


@pytest.mark.parametrize("method", registry.REREADING)
def test_what_kvzip_decodes_stays(llama, method):
    """All decoded tokens are kept: the scores are of the context only."""
    ids = ids_of(1, 200)
    cache = SketchCache(llama.config, method, budget=120, recent=4, keep=["positions"])
    kvsketch.prefill(llama, ids, cache, queries="reread", tokenizer=Letters())
    answer(llama, torch.cat([ids, ids_of(1, 1, 7)], dim=1), cache, new=60)
    for layer in cache.layers:
        slots = layer.stream.slots
        for head in range(4):
            live = slots.masses()[0, head] > 0
            positions = slots.positions[0, head][live]
            assert positions[positions >= 200].tolist() == list(range(200, 260))


def test_a_sample_of_the_queries_is_kept():
    """Queries of a second reading are sampled evenly; the error is measured on every
    fourth query of the sample."""

    from kvsketch import Observed
    from kvsketch.cache import windowed
    from kvsketch.cache.error import WindowError
    from kvsketch.cache.stream import Stream

    generator = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 1, 2, 500, 8, generator=generator)
    queries = torch.randn(1, 4, 200, 8, generator=generator)
    stream = Stream(windowed("heavy_merge"), None)
    stream.extend(Slots(keys, values))
    stream.ask(Observed(queries, 0.3), slice(0, 200), 100)
    assert stream.seen == stream.slots.count == 300
    kept = stream.scores.queries.all()
    assert kept.after
    assert torch.equal(kept.queries, queries[:, :, ::2])
    stream.scores.queries.keep_last(10)  # a sample is not cut to a window
    assert stream.scores.queries.count == 100
    wrong = Slots(keys[:, :, :300], torch.zeros_like(values[:, :, :300]))
    error = WindowError(stream.slots, kept, recent=8)
    assert torch.equal(error._asked.queries, kept.queries[:, :, ::4])
    assert error.error(wrong).tolist() == [[1.0, 1.0]]


@pytest.mark.parametrize("queries", ["prompt", "sample"])
def test_a_method_of_ones_own_is_read_with_as_with_its_name(llama, queries):
    class Own(ALL_METHODS["heavy_merge"]):
        name = "own"

    ids, kept = ids_of(1, 300), []
    for method in (Own, Own(), "heavy_merge"):
        cache = SketchCache(llama.config, method, budget=0.3)
        kvsketch.prefill(llama, ids, cache, queries=queries, tokenizer=Letters())
        kept.append([layer.keys for layer in cache.layers])
    for other in kept[:2]:
        for one, same in zip(other, kept[2], strict=True):
            assert torch.equal(one, same)
