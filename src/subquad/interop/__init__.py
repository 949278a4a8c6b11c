"""Other programs: their checkpoints become runs, their models get our mixers, and our models become files for them."""
