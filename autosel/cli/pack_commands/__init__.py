"""The commands of ``autosel pack``, one file each."""
