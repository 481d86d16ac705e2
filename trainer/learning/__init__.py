"""What rank 0 executes: the models of a rank, the steps of training, a learner for each policy."""
