"""Which cells are copied and read by which launch, drawn (ops/ranges.h)."""

import json
import subprocess
import textwrap

import pytest
from driver_build import build_driver

BLOCK = 128
ROW = 16  # bytes of a cell
PIECE = 64  # cells that one letter of a slot stands for


def cut(lengths: list[int], *, device: int = 0, tail: int, slot: int, **more) -> dict:
    """Resident spans and segments; device, tail and slot in blocks."""
    row_bytes = more.setdefault("row_bytes", ROW)
    sizes = {
        "device_cells": device * BLOCK,
        "tail_cells": tail * BLOCK,
        "slot_bytes": slot * BLOCK * row_bytes,
    }
    flags = [f"--{name}={value}" for name, value in (sizes | more).items()]
    flags.append("--lengths=" + ",".join(map(str, lengths)))
    command = [str(build_driver()), "ranges", *flags]
    return json.loads(subprocess.run(command, capture_output=True, check=True).stdout)


def draw_blocks(launches: dict, num_seqs: int, num_blocks: int) -> str:
    """A line a sequence, a sign a block: D resident, a digit its segment, . neither."""
    lines = [["."] * num_blocks for _ in range(num_seqs)]
    named = [("D", launches["resident"])]
    named += [(str(i), s["spans"]) for i, s in enumerate(launches["segments"])]
    for name, spans in named:
        for span in spans:
            for i in range(span["num_blocks"]):
                block = span["first_block"] + i
                assert lines[span["seq"]][block] == ".", "covered twice"
                lines[span["seq"]][block] = name
    return "\n".join(map("".join, lines))


def draw_slots(launches: dict, slot: int) -> str:
    """A line a segment, a sign for 64 cells: a the first sequence, - gap, . unused."""
    lines = []
    for segment in launches["segments"]:
        signs = ["."] * (slot * BLOCK // PIECE)
        for copy in segment["copies"]:
            at, bytes_ = copy["target"], copy["width"] * copy["height"]
            for i in range(at // ROW // PIECE, (at + bytes_) // ROW // PIECE):
                signs[i] = "-"
        for span in segment["spans"]:
            start = span["offset"] // ROW // PIECE
            for i in range((span["end_cell"] - span["first_cell"]) // PIECE):
                signs[start + i] = "abcdefgh"[span["seq"]]
        lines.append("".join(signs))
    return "\n".join(lines)


def copies(launches: dict) -> list[tuple[int, ...]]:
    """Each copy: (source cell, cells wide, sequences high, cells to the next one)."""
    return [
        (
            copy["source"] // ROW,
            copy["width"] // ROW,
            copy["height"],
            copy["source_pitch"] // ROW,
        )
        for segment in launches["segments"]
        for copy in segment["copies"]
    ]


def ends(launches: dict, num_seqs: int) -> list[list[bool]]:
    """For each sequence, over its launches in order: whether it ends there."""
    every = [launches["resident"]] + [s["spans"] for s in launches["segments"]]
    spans = [span for launch in every for span in launch]
    return [[bool(s["last"]) for s in spans if s["seq"] == b] for b in range(num_seqs)]


@pytest.mark.parametrize(
    ("lengths", "device", "drawn"),
    [
        pytest.param(
            [1000, 130, 600, 0],
            1,
            """
            D0011223
            D3......
            D3445...
            D.......
            """,
            id="ragged",
        ),
        pytest.param(
            [1024, 1],
            0,
            """
            00112233
            4.......
            """,
            id="all_in_the_tail",
        ),
        pytest.param(
            [384, 385],
            3,
            """
            DDDD....
            DDD0....
            """,
            id="at_the_end_of_the_device_part",
        ),
    ],
)
def test_segments_hold_whole_blocks_in_order(
    lengths: list[int], device: int, drawn: str
):
    launches = cut(lengths, device=device, tail=8 - device, slot=2)
    assert draw_blocks(launches, len(lengths), 8) == textwrap.dedent(drawn).strip()
    for one in ends(launches, len(lengths)):
        assert one == [False] * (len(one) - 1) + [True]
    for segment in launches["segments"]:
        for span in segment["spans"]:
            assert span["last"] or span["end_cell"] % BLOCK == 0


@pytest.mark.parametrize(
    ("lengths", "drawn"),
    [
        ([1124], "000011122"),
        ([512], "00000...."),
        ([513], "00011...."),
        ([1124, 0, 0], "000011122\nD........\nD........"),
        ([512, 1124], "00000....\n111122233"),
        ([1124, 1124], "000011112\n222333444"),
    ],
)
def test_the_last_two_segments_may_share_what_is_left(lengths, drawn):
    """Slots of four blocks: no small segment at the end, and not more of them."""
    launches = cut(lengths, tail=9, slot=4, even_end=1)
    assert draw_blocks(launches, len(lengths), 9) == drawn
    plain = cut(lengths, tail=9, slot=4)
    assert len(launches["segments"]) == len(plain["segments"])


def test_one_sequence_is_one_flat_copy_a_segment():
    """Whatever its window, and nothing but live cells.

    cells    0 ... 128 ... 700    1000        window 301: from cell 700 on
                           |-- 300 --|
    """
    launches = cut([1000], device=1, tail=9, slot=8)
    assert copies(launches) == [(0, 872, 1, 9 * BLOCK)]
    assert draw_slots(launches, 8) == "aaaaaaaaaaaaa..."
    windowed = cut([1000], device=1, tail=9, slot=8, window=301)
    assert copies(windowed) == [(700 - BLOCK, 300, 1, 9 * BLOCK)]
    assert [s["gap_bytes"] for s in launches["segments"] + windowed["segments"]] == [
        0,
        0,
    ]


def test_adjacent_sequences_are_one_strided_copy():
    """The longer one's width for both; what the shorter lacks is a gap."""
    launches = cut([384, 320, 384], tail=4, slot=10)
    assert draw_slots(launches, 10) == "aaaaaabbbbb-cccccc.."
    assert copies(launches) == [(0, 384, 3, 4 * BLOCK)]
    (segment,) = launches["segments"]
    assert segment["live_bytes"] == (384 + 320 + 384) * ROW
    assert segment["gap_bytes"] == 64 * ROW


def test_a_sequence_without_live_cells_parts_its_neighbours():
    launches = cut([256, 0, 256], tail=4, slot=4)
    assert draw_slots(launches, 4) == "aaaacccc"
    assert copies(launches) == [(0, 256, 1, 4 * BLOCK), (8 * BLOCK, 256, 1, 4 * BLOCK)]


def test_a_group_goes_on_in_the_next_segment():
    """The second sequence's last block starts a segment; the third doesn't join it."""
    launches = cut([256, 256, 256], tail=2, slot=3)
    assert draw_blocks(launches, 3, 2) == "00\n01\n11"
    assert draw_slots(launches, 3) == "aaaabb\nbbcccc"
    assert copies(launches) == [
        (0, 256, 1, 256),
        (256, 128, 1, 256),
        (384, 128, 1, 256),
        (512, 256, 1, 256),
    ]


@pytest.mark.parametrize(("short", "num_copies"), [(512 - 160, 1), (512 - 161, 2)])
def test_a_gap_is_copied_along_up_to_160_kib(short: int, num_copies: int):
    launches = cut([512, short], tail=4, slot=8, row_bytes=1024)
    (segment,) = launches["segments"]
    assert len(segment["copies"]) == num_copies
    assert segment["gap_bytes"] == (160 << 10 if num_copies == 1 else 0)


def test_gaps_add_up_over_a_group():
    """60 and 100 KiB fit; 60, 100 and 1 do not."""
    lengths = [512, 452, 412]
    assert (
        len(cut(lengths, tail=4, slot=12, row_bytes=1024)["segments"][0]["copies"]) == 1
    )
    lengths.append(511)
    assert (
        len(cut(lengths, tail=4, slot=16, row_bytes=1024)["segments"][0]["copies"]) == 2
    )


def test_a_window_leaves_what_no_query_sees():
    """A window of 200: from place - 199 on.

    cells  0     128   256   384   512
    700                             |xxxxxxxxx   501..699
    400          |xxxxxxxxxx                     201..399, block 1 on the device
    200    |xxxxxxxx                             1..199, all of it there
    """
    launches = cut([700, 400, 200], device=2, tail=4, slot=4, window=200)
    assert draw_blocks(launches, 3, 6) == "...000\n.D00..\nDD...."
    spans = launches["segments"][0]["spans"]
    assert [(s["first_cell"], s["end_cell"]) for s in spans] == [(501, 700), (256, 400)]
    assert [bool(s["first"]) for s in spans] == [True, False]


def test_a_window_of_one_leaves_the_step_to_the_resident_launch():
    """No stored cell is seen, so no segment could write the result."""
    launches = cut([300, 100], device=1, tail=3, slot=2, window=1)
    assert launches["segments"] == []
    assert draw_blocks(launches, 2, 4) == "..D.\nD..."
    assert ends(launches, 2) == [[True], [True]]


def test_a_length_past_the_capacity_still_ends():
    """Its last launch is where a kernel finds the error and writes NaN."""
    launches = cut([515, 600, 512], device=1, tail=3, slot=4)
    assert [one[-1] for one in ends(launches, 3)] == [True] * 3
    spans = [span for segment in launches["segments"] for span in segment["spans"]]
    assert [span["end_cell"] for span in spans if span["last"]] == [512, 512, 512]
    on_device = cut([515], device=4, tail=0, slot=1)
    assert ends(on_device, 1) == [[True]]


def test_more_than_64_sequences_take_more_launches():
    launches = cut([1] * 70, tail=1, slot=70)
    assert [len(segment["spans"]) for segment in launches["segments"]] == [64, 6]
    assert copies(launches) == [(0, 1, 64, BLOCK), (64 * BLOCK, 1, 6, BLOCK)]


def test_rows_behind_the_last_block_are_covered():
    """T = 5 rows behind 126 cells reach into the next block, 300 rows the capacity."""
    assert draw_blocks(cut([126], tail=4, slot=4, num_new=5), 1, 4) == "00.."
    assert draw_blocks(cut([126], tail=4, slot=4, num_new=600), 1, 4) == "0000"
    assert draw_blocks(cut([126], device=1, tail=3, slot=4, num_new=5), 1, 4) == "DD.."


def test_no_live_cell_of_the_tail_is_no_segment():
    launches = cut([0, 128, 5], device=1, tail=1, slot=1)
    assert launches["segments"] == []
    assert draw_blocks(launches, 3, 2) == "D.\nDD\nD."
    assert ends(launches, 3) == [[True]] * 3


def test_no_sequence_is_no_launch():
    assert cut([], tail=1, slot=1) == {"resident": [], "segments": []}
