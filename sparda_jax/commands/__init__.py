"""What command lines share beyond `sparda_jax.cli`: options and output of one topic each."""
