"""Mutations of the kernels that the emulator has to catch, each a change of one place.

Every call that orders threads, copies or products is here dropped, most of them wrong in another
way too.
"""

import re
from typing import NamedTuple


class Mutant(NamedTuple):
    """`old` occurs once in the file (or `nth`, from 0, is meant) and becomes `new`."""

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

    def apply(self, text):
        start = self.start(text)
        return text[:start] + self.new + text[start + len(self.old) :]

    def is_whole(self, text):
        """Whether it changes whole statements into whole statements, and declares nothing."""
        before = without_comments(text[: self.start(text)]).rstrip()
        statements = [without_comments(part).strip() for part in (self.old, self.new)]
        if before[-1] == ")":  # of an `if`: it governs the first of them alone
            return all(code.count(";") < 2 and is_statements(code) for code in statements)
        return before[-1] in "{};" and all(map(is_statements, statements))


def without_comments(code):
    return re.sub(r"//.*", "", code)


def is_statements(code):
    if not code:
        return True
    balanced = all(code.count(one) == code.count(other) for one, other in ("()", "{}"))
    declares = re.match(r"(const|constexpr|int|float|auto|return)\b", code)
    return balanced and code[0].isalpha() and code[-1] == ";" and not declares


def apply_all(mutants, text):
    """The text of a file with a choice for each of its mutants, made while the program runs.

    mutants: {number: mutant of whole statements}, no two at one place. The program has the number
    of the one that it shows in `mutated`.
    """
    places = {number: mutant.start(text) for number, mutant in mutants.items()}
    for number in sorted(places, key=places.get, reverse=True):
        start, (_, old, new, *_) = places[number], mutants[number]
        end = start + len(old)
        if "//" in old.split("\n")[-1]:  # a comment that it has the beginning of
            end = text.index("\n", end)
        choice = f"if (emulated::mutated == {number}) {{\n{new}\n}} else {{\n{text[start:end]}\n}}"
        text = f"{text[:start]}{{ {choice} }}{text[end:]}"
    return text


def packs(mutants, texts):
    """[{number: mutant}]: sets that one program has together, those of half a statement alone.

    texts: {file: its text}.
    """
    found, alone = [], []
    for number, mutant in enumerate(mutants):
        if not mutant.is_whole(texts[mutant.file]):
            alone.append({number: mutant})
            continue
        free = (p for p in found if not any(overlap(mutant, o, texts) for o in p.values()))
        if (pack := next(free, None)) is None:
            found.append(pack := {})
        pack[number] = mutant
    return found + alone


def overlap(one, other, texts):
    first, second = (mutant.start(texts[mutant.file]) for mutant in (one, other))
    apart = first + len(one.old) <= second or second + len(other.old) <= first
    return one.file == other.file and not apart


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
        ("{ group_sync(barrier, HopperShape::threads); }", "{}"),
        ("acquire_staging();\n#pragma unroll", "#pragma unroll"),
        ("bulk_store_read();\n    sync();", "bulk_store_read();"),
        ("bulk_fence();\n      sync();", "bulk_fence();"),
        ("cluster_sync();\n  if (group == 0)", "if (group == 0)"),
        ("cluster_sync();  // no block ends", "// no block ends"),
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
        ("bulk_load(pipe.x(step), x, k", "bulk_load(pipe.x(step + 1), x, k"),
        (
            "column,\n                       pipe.full(step)",
            "column,\n                       pipe.full(step + 1)",
        ),
        ("barrier_wait(pipe.empty(step)", "barrier_wait(pipe.empty(step + 1)"),
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
        ("kCluster * kGroup / kWarp);", "kGroup / kWarp);"),
        ("kCluster * kGroup / kWarp);", "kCluster * kGroup / kWarp + 1);"),
        ("thread % kWarp < kCluster)", "thread % kWarp < 1)"),
        (
            "group_arrive(kTurnBarrier + (group ^ 1), 2 * kGroup)",
            "group_arrive(kTurnBarrier + group, 2 * kGroup)",
        ),
        (
            "group_arrive(kTurnBarrier + (group ^ 1), 2 * kGroup)",
            "group_arrive(kTurnBarrier + (group ^ 1), kGroup)",
        ),
        ("if (!work.first) group_sync", "group_sync"),
        ("if (!work.last) group_arrive", "group_arrive"),
        ("group_product_wait<1>();", "group_product_wait<2>();"),
        ("group_product_wait<0>();", "group_product_wait<1>();"),
        # wrong parities
        ("pipe.parity(step) ^ 1)", "pipe.parity(step))"),
        ("pipe.parity(step + k))", "pipe.parity(step + k) ^ 1)"),
        ("return step / kStages % 2;", "return step % 2;"),
        # what groups have apart
        ("kGroupBarrier + group}", "kGroupBarrier}"),
        ("kStaging + group * kStagingBytes", "kStaging"),
        ("+ group * kScratch;", ";"),
        ("turn ^= 1;", ""),
        ("step += work.steps;", ""),
    ),
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
        ("const int next = step + kStages - 1;", "const int next = step + kStages;"),
        ("stages + next % kStages", "stages + (next + 1) % kStages"),
        ("void sync() const { block_sync(); }", "void sync() const {}"),
        ("void acquire_staging() const { block_sync(); }", "void acquire_staging() const {}"),
        ("acquire_staging();\n#pragma unroll", "#pragma unroll"),
        ("sync();\n      for (int i = this->thread", "for (int i = this->thread"),
        engine="portable",
    ),
]

# Syncs of the tiles, by file and how often they stand there. One engine has to show each: a block
# of the portable engine has one tile, and a group of the other has whole rows in a warp.
TILE = [
    *each("tile.cuh", "tile.sync();", 11, "either"),
    *each("tile.cuh", "tile.acquire_staging();", 1, "either"),
    *each("epilogues.cuh", "tile.sync();", 2, "either"),
]

MUTANTS = [*HOPPER, *PORTABLE, *TILE]
