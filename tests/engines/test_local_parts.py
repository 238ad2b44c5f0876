"""The numeric parts of the local engine against plain definitions."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.engines.local.attention import packed_attention
from gyre.engines.local.sampling import Sampler

HEADS, KV_HEADS, DIM = 4, 2, 8


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """[heads, T_q, d] over [kv_heads, T_k, d]: softmax(qk/√d)v, each query sees the keys up to its own position."""
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, dim=0) for x in (k, v))
    scores = q @ k.transpose(1, 2) * DIM**-0.5
    hidden = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).triu(k.shape[1] - q.shape[1] + 1)
    return torch.softmax(scores.masked_fill(hidden, float("-inf")), -1) @ v


requests_of_a_pass = st.lists(
    st.tuples(st.integers(1, 12), st.integers(0, 20)), min_size=1, max_size=5
)  # (queries, earlier keys)


@settings(max_examples=40)
@given(lengths=requests_of_a_pass, paged=st.booleans(), seed=st.integers(0, 1000))
def test_packed_attention_is_attention_per_request(lengths, paged, seed):
    if not paged:
        lengths = [(queries, 0) for queries, _ in lengths]
    random = torch.Generator().manual_seed(seed)
    total_q, total_k = sum(q for q, _ in lengths), sum(q + past for q, past in lengths)
    query = torch.randn(1, HEADS, total_q, DIM, generator=random)
    keys, values = torch.randn(2, total_k, KV_HEADS, DIM, generator=random)
    if paged:
        slots = torch.randperm(total_k + 7, generator=random)[:total_k]
        memory = torch.full((2, total_k + 7, KV_HEADS, DIM), float("nan"))
        memory[0, slots], memory[1, slots] = keys, values
    else:
        slots, memory = torch.empty(0, dtype=torch.long), torch.stack([keys, values])
    output, _ = packed_attention(
        torch.nn.Identity(),
        query,
        memory[0].transpose(0, 1)[None],
        memory[1].transpose(0, 1)[None],
        None,
        scaling=DIM**-0.5,
        cu_seq_lens_q=torch.tensor([0, *(q for q, _ in lengths)]).cumsum(0),
        cu_seq_lens_k=torch.tensor([0, *(q + past for q, past in lengths)]).cumsum(0),
        read_index=[slots],
    )
    at_q = at_k = 0
    for queries, past in lengths:
        k, v = (x[at_k : at_k + queries + past].transpose(0, 1) for x in (keys, values))
        expected = plain(query[0, :, at_q : at_q + queries], k, v)
        found = output[0, at_q : at_q + queries].view(queries, HEADS, DIM).transpose(0, 1)
        assert torch.allclose(found, expected, atol=1e-5)
        at_q, at_k = at_q + queries, at_k + queries + past


def test_attention_variants_are_refused():
    with pytest.raises(NotImplementedError, match="softcap"):
        packed_attention(
            torch.nn.Identity(),
            torch.zeros(1, 1, 1, 1),
            torch.zeros(1, 1, 1, 1),
            torch.zeros(1, 1, 1, 1),
            None,
            scaling=1.0,
            cu_seq_lens_q=torch.tensor([0, 1]),
            cu_seq_lens_k=torch.tensor([0, 1]),
            read_index=[torch.empty(0, dtype=torch.long)],
            softcap=30.0,
        )


def test_draws_follow_the_distribution():
    probabilities = torch.tensor([0.5, 0.0, 0.25, 0.2, 0.05])
    tokens, logprobs = Sampler(0).draw(probabilities.log().expand(20_000, -1))
    frequencies = torch.bincount(tokens, minlength=5) / 20_000
    # Five standard deviations of a frequency.
    assert torch.all((frequencies - probabilities).abs() <= 5 * (probabilities / 20_000).sqrt())
    assert torch.allclose(logprobs, probabilities.log()[tokens], atol=1e-6)


def test_impossible_tokens_are_never_drawn():
    scores = torch.full((5_000, 6), float("-inf"))
    scores[:, 2], scores[:, 3] = 0.0, -2.0
    tokens, logprobs = Sampler(1).draw(scores)
    assert set(tokens.tolist()) == {2, 3}
    assert torch.isfinite(logprobs).all()


def test_the_seed_decides():
    scores = torch.randn(64, 50, generator=torch.Generator().manual_seed(5))
    assert torch.equal(Sampler(3).draw(scores)[0], Sampler(3).draw(scores)[0])
    assert not torch.equal(Sampler(3).draw(scores)[0], Sampler(4).draw(scores)[0])


def test_ids_and_logprobs_share_the_library_tensor():
    scores = torch.randn(1, 3, 20, generator=torch.Generator().manual_seed(5))
    output = torch.zeros(2, 8, dtype=torch.int32)
    Sampler(3).draw_into(scores, output)
    tokens, logprobs = Sampler(3).draw(scores[0])
    assert output[0, :3].tolist() == tokens.tolist()
    assert torch.equal(output[1, :3].view(torch.float32), logprobs)
