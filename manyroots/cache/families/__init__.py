"""The kinds of memory of a layer. Family names occur only in this folder."""
