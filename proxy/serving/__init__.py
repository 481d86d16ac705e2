"""The data plane: serves the calls of agents.

From the handler of a request down to one answer:

    endpoints   authorises, parses, opens the call, writes its answer or its error
    sessions    authorisation, and the token trees in memory
    calls       identifies and admits the request, joins a running call or starts one
    call        the call and its states; `retries` decides what a repeated request gets
    answer      one answer while it is sampled
    stream      the connections that watch a call
    arrived_answers  records which answers arrived

`ownership` decides which of several processes serves a session; `forwarding` sends its calls there.
"""
