"""Mutations of the kernels that the emulator has to catch, each a change of one place.

Every call that orders threads, copies or products is here dropped, most of them wrong in another
way too.
"""

from typing import NamedTuple


class Mutant(NamedTuple):
    """`old` occurs once in the file (or `nth`, from 0, is meant) and becomes `new`.

    Both are whole statements, which end in semicolons, or whole expressions.
    """

    file: str
    old: str
    new: str
    nth: int = 0
    engine: str = "hopper"

    def __repr__(self):
        place = f" ({self.nth})" if self.nth else ""
        change = f"becomes {self.new.strip()}" if self.new.strip() else "is dropped"
        return f"{self.file}: {' '.join(self.old.split())}{place} {change}"

    def start(self, text):
        """Where it begins in the text of its file."""
        parts = text.split(self.old)
        assert len(parts) > self.nth + 1, f"{self.file} has no {self.old!r}"
        return len(self.old.join(parts[: self.nth + 1]))

    def span(self, text):
        """[start, end) of what it changes, with the rest of a comment that `old` ends in."""
        start = self.start(text)
        end = start + len(self.old)
        return start, text.index("\n", end) if "//" in self.old.split("\n")[-1] else end


def choice(number, mutant, otherwise):
    """C++ that is what the mutant makes of it where the program shows this one."""
    shown = f"emulated::mutated == {number}"
    if ";" in mutant.old:
        return f"{{ if ({shown}) {{\n{mutant.new}\n}} else {{\n{otherwise}\n}} }}"
    return f"({shown} ? ({mutant.new}) : ({otherwise}))"


def apply_all(mutants, text):
    """The text of a file with a choice for each of its mutants, made while the program runs.

    mutants: {number: mutant}, one within another or apart. The program has the number of the one
    that it shows in `mutated`.
    """
    spans = {number: mutant.span(text) for number, mutant in mutants.items()}
    # From the inside out, and of equal ones each within the choice of the last.
    for number in sorted(spans, key=lambda n: spans[n][1] - spans[n][0]):
        start, end = spans.pop(number)
        chosen = choice(number, mutants[number], text[start:end])
        more = len(chosen) - (end - start)
        text = text[:start] + chosen + text[end:]
        spans = {n: (s + more * (s >= end), e + more * (e >= end)) for n, (s, e) in spans.items()}
    return text


def packs(mutants, texts):
    """[{number: mutant}]: sets that one program has together.

    texts: {file: its text}.
    """
    found = []
    for number, mutant in enumerate(mutants):
        free = (p for p in found if not any(cross(mutant, o, texts) for o in p.values()))
        if (pack := next(free, None)) is None:
            found.append(pack := {})
        pack[number] = mutant
    return found


def cross(one, other, texts):
    """Whether both change something, and each something that the other does not."""
    if one.file != other.file:
        return False
    (start, end), (first, last) = (mutant.span(texts[mutant.file]) for mutant in (one, other))
    apart = end <= first or last <= start
    within = (start <= first and last <= end) or (first <= start and end <= last)
    return not apart and not within


def dropped(file, *lines, engine="hopper"):
    return [Mutant(file, line, "", engine=engine) for line in lines]


def changed(file, *pairs, engine="hopper"):
    return [Mutant(file, old, new, engine=engine) for old, new in pairs]


def each(file, line, count, engine):
    return [Mutant(file, line, "", nth, engine) for nth in range(count)]


HOPPER = [
    *dropped(
        "hopper.cuh",
        # staging memory and stores
        "if (thread == 0) bulk_store_read();",
        "bulk_fence();",
        "bulk_store_commit();",
        "if (thread == 0) bulk_store_wait();",
        # the producer
        "barrier_wait(pipe.empty(step), pipe.parity(step) ^ 1);",
        "barrier_expect(pipe.full(step), kStageBytes);",
        # the consumers
        "barrier_wait(pipe.full(step + k), pipe.parity(step + k));",
        "group_product_begin();",
        "group_product_commit();",
        "group_product_wait<1>();",
        "if (k > 0) release(pipe, step + k - 1, thread);",
        "group_product_wait<0>();",
        "if (count > 0) release(pipe, step + count - 1, thread);",
        "await_turn(group, work);",
        "pass_turn(group, work);",
        # begin and end
        "barrier_init_fence();",
        "fewer_registers<40>();",
    ),
    *changed(
        "hopper.cuh",
        ("group_sync(barrier, HopperShape::threads);", ""),
        ("acquire_staging();", ""),
        (" sync();", ""),
        ("bulk_fence();\n      sync();", "bulk_fence();"),
        ("cluster_sync();  // no block ends", ""),
        # moved
        (
            "bulk_fence();\n      sync();\n",
            "sync();\n      bulk_fence();\n",
        ),
        (
            "group_product_wait<1>();\n    if (k > 0) release(pipe, step + k - 1, thread);",
            "if (k > 0) release(pipe, step + k - 1, thread);\n    group_product_wait<1>();",
        ),
        (
            "group_product_wait<0>();\n  if (count > 0) release(pipe, step + count - 1, thread);",
            "if (count > 0) release(pipe, step + count - 1, thread);\n  group_product_wait<0>();",
        ),
        (
            "await_turn(group, work);\n      begin_products(pipe, step, work.steps, thread, s);",
            "begin_products(pipe, step, work.steps, thread, s);\n      await_turn(group, work);",
        ),
        (
            "begin_products(pipe, step, work.steps, thread, s);\n      pass_turn(group, work);",
            "pass_turn(group, work);\n      begin_products(pipe, step, work.steps, thread, s);",
        ),
        # a stage early or late
        ("release(pipe, step + k - 1, thread)", "release(pipe, step + k, thread)"),
        ("release(pipe, step + count - 1, thread)", "release(pipe, step + count, thread)"),
        ("pipe.x(step)", "pipe.x(step + 1)"),
        # wrong counts of bytes, arrivals and threads
        (
            "barrier_expect(pipe.full(step), kStageBytes)",
            "barrier_expect(pipe.full(step), kStageBytes / 2)",
        ),
        (
            "barrier_expect(pipe.full(step), kStageBytes)",
            "barrier_expect(pipe.full(step), 2 * kStageBytes)",
        ),
        ("(1 << kCluster) - 1", "1 << rank"),
        ("barrier_init(pipe.full(stage), 1)", "barrier_init(pipe.full(stage), 2)"),
        ("kCluster * kGroup / kWarp", "kGroup / kWarp"),
        ("kCluster * kGroup / kWarp", "kCluster * kGroup / kWarp + 1"),
        ("thread % kWarp < kCluster", "thread % kWarp < 1"),
        (
            "group_arrive(kTurnBarrier + (group ^ 1), 2 * kGroup)",
            "group_arrive(kTurnBarrier + group, 2 * kGroup)",
        ),
        (
            "group_arrive(kTurnBarrier + (group ^ 1), 2 * kGroup)",
            "group_arrive(kTurnBarrier + (group ^ 1), kGroup)",
        ),
        (
            "if (!work.first) group_sync(kTurnBarrier + group, 2 * kGroup);",
            "group_sync(kTurnBarrier + group, 2 * kGroup);",
        ),
        ("!work.last", "true"),
        ("group_product_wait<1>();", "group_product_wait<2>();"),
        ("group_product_wait<0>();", "group_product_wait<1>();"),
        # wrong parities
        ("pipe.parity(step) ^ 1", "pipe.parity(step)"),
        ("pipe.parity(step + k)", "pipe.parity(step + k) ^ 1"),
        ("step / kStages % 2", "step % 2"),
        # what groups have apart
        ("kGroupBarrier + group", "kGroupBarrier"),
        ("kStagingOffset + group * kStagingBytes", "kStagingOffset"),
        ("group * kScratch", "0"),
        ("turn ^= 1;", ""),
        ("step += work.steps;", ""),
    ),
    # the first meeting of a cluster; of the column operand; the producer's
    Mutant("hopper.cuh", "cluster_sync();", ""),
    Mutant("hopper.cuh", "pipe.full(step)", "pipe.full(step + 1)", 2),
    Mutant("hopper.cuh", "pipe.empty(step)", "pipe.empty(step + 1)"),
]

PORTABLE = [
    *dropped(
        "portable.cuh",
        "copy_async_wait<kStages - 2>();",
        engine="portable",
    ),
    *each("portable.cuh", "copy_async_commit();", 2, "portable"),
    *changed(
        "portable.cuh",
        ("block_sync();  // the stage is there", "// the stage is there"),
        ("block_sync();  // no copy is under way", "// no copy is under way"),
        ("copy_async_wait<kStages - 2>();", "copy_async_wait<kStages - 1>();"),
        ("step + kStages - 1", "step + kStages"),
        ("next % kStages", "(next + 1) % kStages"),
        ("acquire_staging();", ""),
        (" sync();", ""),
        engine="portable",
    ),
    # sync, acquire_staging
    *each("portable.cuh", "block_sync();", 2, "portable"),
]

# Syncs of the tiles, by file and how often they stand there. One engine has to show each: a block
# of the portable engine has one tile, and a group of the other has whole rows in a warp.
TILE = [
    *each("tile.cuh", "tile.sync();", 11, "either"),
    *each("tile.cuh", "tile.acquire_staging();", 1, "either"),
    *each("epilogues.cuh", "tile.sync();", 2, "either"),
]

MUTANTS = [*HOPPER, *PORTABLE, *TILE]
