"""Where a rank's communication goes: the hooks that let ringsim see what ``torch.distributed`` does."""
