import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre.core.tokens import TokenIds
from gyre.engines.base import GenerateChunk, GenerateRequest, Sampling
from gyre.rpc.service import Method

ids = st.lists(st.integers(0, 2**31 - 1), max_size=20)


@given(ids, ids)
def test_token_ids_behave_like_their_list(one, other):
    packed = TokenIds(one)
    assert packed == one
    assert one == packed
    assert TokenIds(packed.packed) == packed == TokenIds(packed)
    assert (list(packed), len(packed), packed + other, packed[1:]) == (one, len(one), one + other, one[1:])
    assert (packed == TokenIds(other), packed != other) == (one == other, one != other)
    assert (packed.digest == TokenIds(other).digest) == (one == other)


def test_what_is_no_token_id_is_refused():
    with pytest.raises(OverflowError):
        TokenIds([2**31])
    with pytest.raises(ValueError, match="each takes four"):
        TokenIds(b"abc")


async def _service(self, request: GenerateRequest) -> GenerateChunk: ...


@given(ids)
def test_token_ids_travel_packed(prompt):
    method = Method("generate", _service)
    request = GenerateRequest(request_id="r", input_ids=TokenIds(prompt), max_new_tokens=1, sampling=Sampling())
    wire = method.encode_arguments((request,))
    assert TokenIds(prompt).packed in wire
    assert method.decode_arguments(wire) == (request,)
    chunk = GenerateChunk(output_ids=[1], logprobs=[0.0], versions=[0], prompt_digest=TokenIds(prompt).digest)
    assert method.decode_result(method.encode_result(chunk)) == chunk
