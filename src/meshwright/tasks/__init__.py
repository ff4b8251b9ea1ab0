"""Tasks: questions with known answers for a model, our own and lm-evaluation-harness's."""
