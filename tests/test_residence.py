"""A trainer that shares its device moves in for a step, and home again."""

from __future__ import annotations

import torch

from areal_ray.training.residence import Residence


def two_steps(*, moving: bool) -> list[torch.Tensor]:
    """Of Adam, at home between them: all that there is afterwards."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def tensors():
        yield from model.parameters()
        for state in optimizer.state.values():
            yield from state.values()

    residence = Residence(torch.device("cpu"), tensors)
    for _ in range(2):
        model(torch.ones(4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if moving:
            residence.move_out()
            residence.move_out()
            home = model.weight.data
            residence.move_in()
            residence.move_in()
            assert model.weight.data.data_ptr() != home.data_ptr()
    if moving:
        residence.move_out()
    return [tensor.detach().clone() for tensor in tensors()]


def test_moving_changes_no_number() -> None:
    moved = two_steps(moving=True)
    stayed = two_steps(moving=False)
    assert len(moved) == 2 + 2 * 3
    for one, other in zip(moved, stayed, strict=True):
        assert torch.equal(one, other)


def test_each_tensor_comes_home_to_the_memory_that_it_left() -> None:
    """A weight update knows that memory, and sends from there."""
    parameter = torch.nn.Parameter(torch.zeros(3))
    residence = Residence(torch.device("cpu"), lambda: [parameter])
    residence.move_out()
    stream = torch.zeros(3)
    parameter.data = stream
    residence.move_in()
    parameter.data.fill_(7.0)
    assert stream.tolist() == [0.0, 0.0, 0.0]
    residence.move_out()
    assert parameter.data.data_ptr() == stream.data_ptr()
    assert stream.tolist() == [7.0, 7.0, 7.0]
