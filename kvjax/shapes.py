"""The letters of every shape, and the two sizes that fix how attention adds up.

    B  sequences            N  query heads          D  model width
    T  new tokens           K  key/value heads      F  mlp width
    S  cells                G  N // K               V  vocabulary
    L  layers               H  head size            R  record length (elements)

A *cell* holds one token's keys and values of one layer. A *record* is one cell of one
key/value head: the key vector, the value vector, padding to 16 bytes. A *row* is a
step's new record. A *part* of a cache is what lies on the device, or the tail, which
lies in host memory.
"""

BLOCK = 128  # cells reduced together; parts and segments end at block borders
GROUP = 8  # blocks folded together before the groups are folded
RECORD_ALIGN = 16  # bytes
