"""Learning from daily sessions, at the recorder: who has agreed, and which adapter a session has.

    consent      has a session opted in?
    assignment   which adapter does a new session sample from?
    extra        the requests of learners, each with a key that opens nothing else

The learner is `trainer.extras.learn`.
"""
