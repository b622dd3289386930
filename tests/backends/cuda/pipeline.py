"""The protocol of csrc/cuda/hopper.cuh as a state machine, searched in every interleaving.

Two blocks of a cluster, in each a producer and two groups of consumers that take tiles in turns.
An action is what one of them does between two waits, or a copy that lands. A barrier is what the
hardware has: a parity, arrivals and bytes. What a stage really holds is kept beside it, so that a
wait which passes too early, and a write to a stage that is not free, show.

A copy may land at once or be an action of its own (`late`). Landing enables a take and nothing
else, and a take may be late by itself, so both reach the same wrong states; the former are fewer.
"""

from typing import NamedTuple

BLOCKS = GROUPS = (0, 1)


class ProtocolError(Exception):
    """What an interleaving leads to."""


class State(NamedTuple):
    """Tuples by block, then by stage or group; steps count through all tiles."""

    produced: tuple  # steps that the producer has issued
    full: tuple  # (parity, arrivals, boxes that are still to come) of 1 arrival wanted
    empty: tuple  # (parity, arrivals) of 2 wanted, one from each block
    landing: tuple  # steps of the boxes under way, or None: (own box, box of the other's producer)
    holds: tuple  # steps of the boxes that are there, or None
    at: tuple  # of each group: its place in its actions
    turn: tuple  # of each group: whether the other has passed it the turn


class Protocol:
    """`stages`; `steps` of each of `tiles`; the others are what a flawed protocol would do."""

    def __init__(self, stages, steps, tiles=3, *, late=False, turns=True, early=False, alone=False):
        self.stages, self.steps, self.tiles, self.late = stages, steps, tiles, late
        self.alone = alone  # a release tells this block's producer alone
        done = "done" if early else "release"  # the product has read its stage
        self.actions = tuple(self.of_group(group, turns, early) for group in GROUPS)
        # Where each step is given back: (group, place after it).
        self.given_back = {
            step: (group, place + 1)
            for group in GROUPS
            for place, (what, step) in enumerate(self.actions[group])
            if what == done
        }

    def of_group(self, group, turns, early):
        actions = []
        for tile in range(group, self.tiles, 2):
            first = tile * self.steps
            if turns and tile > 0:
                actions.append(("await", None))
            last = first + self.steps - 1
            for step in range(first, first + self.steps):
                actions.append(("take", step))
                if early:
                    actions.append(("release", step))
                if step > first:
                    actions.append(("done" if early else "release", step - 1))
            if turns and tile + 1 < self.tiles:
                actions.append(("pass", None))
            actions.append(("done" if early else "release", last))
        return actions

    def start(self):
        def each(part):
            return (tuple(part for _ in range(self.stages)),) * 2

        return State(
            (0, 0), each((0, 0, 0)), each((0, 0)), each((None, None)), each((None, None)),
            ((0, 0), (0, 0)), ((False, False), (False, False)),
        )  # fmt: skip

    def free(self, state, block, step):
        """Whether the block has given back what its stage held before `step`."""
        if step < self.stages:
            return True
        group, after = self.given_back[step - self.stages]
        return state.at[block][group] >= after

    def following(self, state):
        """Every state that one action leads to."""
        for block in BLOCKS:
            if state.produced[block] < self.steps * self.tiles:
                yield from self.produce(state, block)
            for stage in range(self.stages):
                for box in (0, 1):
                    if state.landing[block][stage][box] is not None:
                        yield self.land(state, block, stage, box)
            for group in GROUPS:
                if state.at[block][group] < len(self.actions[group]):
                    yield from self.consume(state, block, group)

    def produce(self, state, block):
        step = state.produced[block]
        stage, parity = step % self.stages, step // self.stages % 2
        if state.empty[block][stage][0] == parity ^ 1:
            return  # it waits
        full, landing, holds = state.full, state.landing, state.holds
        was, arrived, boxes = full[block][stage]
        if arrived:
            raise ProtocolError(f"block {block} arrives twice for step {step}")
        full = put(full, block, stage, settled(was, 1, boxes + 2))
        for target, box in ((block, 0), (1 - block, 1)):
            if not self.free(state, target, step):
                raise ProtocolError(f"step {step} is written before its stage is free")
            landing = put(landing, target, stage, one(landing[target][stage], box, step))
            holds = put(holds, target, stage, one(holds[target][stage], box, None))
        produced = one(state.produced, block, step + 1)
        state = state._replace(produced=produced, full=full, landing=landing, holds=holds)
        if not self.late:
            state = self.land(self.land(state, block, stage, 0), 1 - block, stage, 1)
        yield state

    def land(self, state, block, stage, box):
        step = state.landing[block][stage][box]
        parity, arrived, boxes = state.full[block][stage]
        return state._replace(
            full=put(state.full, block, stage, settled(parity, arrived, boxes - 1)),
            landing=put(state.landing, block, stage, one(state.landing[block][stage], box, None)),
            holds=put(state.holds, block, stage, one(state.holds[block][stage], box, step)),
        )

    def consume(self, state, block, group):
        what, step = self.actions[group][state.at[block][group]]
        at = put(state.at, block, group, state.at[block][group] + 1)
        if what == "await":
            if state.turn[block][group]:
                yield state._replace(at=at, turn=put(state.turn, block, group, False))
        elif what == "pass":
            if state.turn[block][1 - group]:
                raise ProtocolError("a turn is passed twice")
            yield state._replace(at=at, turn=put(state.turn, block, 1 - group, True))
        elif what == "take":
            stage, parity = step % self.stages, step // self.stages % 2
            if state.full[block][stage][0] == parity:
                return  # it waits
            if state.holds[block][stage] != (step, step):
                raise ProtocolError(f"step {step} is read before it is there")
            yield state._replace(at=at)
        elif what == "done":
            yield state._replace(at=at)
        else:
            stage, empty = step % self.stages, state.empty
            for target in (block,) if self.alone else BLOCKS:
                parity, arrivals = empty[target][stage]
                whole = arrivals + 1 == (1 if self.alone else 2)
                now = (parity ^ 1, 0) if whole else (parity, arrivals + 1)
                empty = put(empty, target, stage, now)
            yield state._replace(at=at, empty=empty)

    def ended(self, state):
        """Everything is done, and no barrier is left in mid phase."""
        return (
            state.produced == (self.steps * self.tiles,) * 2
            and state.at == (tuple(map(len, self.actions)),) * 2
            and all(part[1:] == (0, 0) for block in state.full for part in block)
            and all(arrivals == 0 for block in state.empty for _, arrivals in block)
            and not any(map(any, state.turn))
        )

    def search(self):
        """Visits every state there is; their number. ProtocolError where one is."""
        seen = {self.start()}
        left = list(seen)
        while left:
            state = left.pop()
            following = list(self.following(state))
            if not following and not self.ended(state):
                raise ProtocolError("everyone waits, or a barrier is left in mid phase")
            for new in following:
                if new not in seen:
                    seen.add(new)
                    left.append(new)
        return len(seen)


def settled(parity, arrived, boxes):
    """An mbarrier of one arrival: a phase ends with it and the last byte, in either order."""
    return (parity ^ 1, 0, 0) if arrived == 1 and boxes == 0 else (parity, arrived, boxes)


def one(part, place, value):
    return (*part[:place], value, *part[place + 1 :])


def put(parts, block, place, value):
    return one(parts, block, one(parts[block], place, value))
