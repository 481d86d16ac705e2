"""The data plane: serves the calls of agents.

From the handler of a request down to one answer; each file imports only files below it:

    endpoints   authorises, parses, opens the call, writes its answer or its error
    events      the events of one agent that streams
    incoming    identifies and admits a request, joins a running call or starts one
    call        the call and its states, and the connections that watch it
    answer      one answer: its parser, its generation and its turn
    ownership   which of several processes serves a session; which answers arrived
    sessions    authorisation, and the state of the sessions in memory
    branch      which calls of a branch are answered from its recording
    retries     what a repeated request gets
    asked       a request with its keys

`forwarding` sends the calls of a session to the process that owns it.
"""
