"""Training-inference mismatch in RL of language models: exact on tabular policies, corrections for any trainer."""
