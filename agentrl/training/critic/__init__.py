"""The critic: values of tokens, learnt beside the policy."""
