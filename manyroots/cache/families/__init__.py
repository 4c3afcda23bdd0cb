"""The ways a layer remembers. Family names occur nowhere outside this folder."""
