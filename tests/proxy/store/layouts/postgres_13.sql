CREATE TABLE public.agentic_proxy_schema (
    version integer NOT NULL
);
CREATE SEQUENCE public.answers_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
CREATE TABLE public.answers (
    session_id text NOT NULL COLLATE pg_catalog."C",
    idx integer NOT NULL,
    status text NOT NULL,
    versions bytea NOT NULL,
    finish_reason text,
    answer_key bytea NOT NULL,
    first_token_s double precision,
    duration_s double precision,
    sampled_ids bytea NOT NULL,
    logprobs bytea NOT NULL,
    answer bytea NOT NULL,
    seq bigint DEFAULT nextval('public.answers_seq'::regclass),
    engine text,
    routed_experts bytea,
    alternatives bytea
);
CREATE TABLE public.deliveries (
    session_id text NOT NULL COLLATE pg_catalog."C",
    idx integer NOT NULL,
    arrived integer NOT NULL
);
CREATE TABLE public.events (
    seq bigint NOT NULL,
    session_id text NOT NULL COLLATE pg_catalog."C",
    at double precision NOT NULL,
    kind text NOT NULL,
    data bytea NOT NULL
);
CREATE SEQUENCE public.events_seq_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
ALTER SEQUENCE public.events_seq_seq OWNED BY public.events.seq;
CREATE TABLE public.marks (
    session_id text NOT NULL,
    rule text NOT NULL,
    action text NOT NULL,
    turn integer NOT NULL,
    at double precision NOT NULL,
    found text NOT NULL
);
CREATE TABLE public.owners (
    number integer NOT NULL,
    started_at timestamp with time zone DEFAULT now() NOT NULL,
    address text
);
CREATE SEQUENCE public.owners_number_seq
    AS integer
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
ALTER SEQUENCE public.owners_number_seq OWNED BY public.owners.number;
CREATE TABLE public.policies (
    name text NOT NULL,
    version bigint NOT NULL,
    adapter text NOT NULL,
    run text DEFAULT ''::text NOT NULL
);
CREATE TABLE public.quotas (
    name text NOT NULL,
    max_turns bigint,
    max_tokens bigint,
    turns bigint DEFAULT 0 NOT NULL,
    tokens bigint DEFAULT 0 NOT NULL
);
CREATE TABLE public.rewards (
    seq bigint NOT NULL,
    session_id text NOT NULL COLLATE pg_catalog."C",
    reward_key text NOT NULL,
    value double precision NOT NULL,
    parts bytea NOT NULL,
    turn integer,
    branch integer NOT NULL
);
CREATE SEQUENCE public.rewards_seq_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
ALTER SEQUENCE public.rewards_seq_seq OWNED BY public.rewards.seq;
CREATE TABLE public.search_rules (
    name text NOT NULL,
    query bytea NOT NULL,
    created_at double precision NOT NULL
);
CREATE TABLE public.sessions (
    session_id text NOT NULL COLLATE pg_catalog."C",
    key_hash bytea NOT NULL,
    kind text NOT NULL,
    status text NOT NULL,
    created_at double precision NOT NULL,
    expires_at double precision NOT NULL,
    completed_at double precision,
    sampling bytea NOT NULL,
    profile text NOT NULL,
    limits bytea NOT NULL,
    metadata bytea NOT NULL,
    origin_session text COLLATE pg_catalog."C",
    origin_turn integer,
    origin_salvages integer DEFAULT 0 NOT NULL,
    origin bytea
);
CREATE SEQUENCE public.turns_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;
CREATE TABLE public.turns (
    session_id text NOT NULL COLLATE pg_catalog."C",
    idx integer NOT NULL,
    owner integer NOT NULL,
    parent integer,
    shared_tokens integer NOT NULL,
    fork_cause text,
    request_key bytea NOT NULL,
    sampling bytea NOT NULL,
    dialect text NOT NULL,
    agent_id text,
    started_at double precision NOT NULL,
    prompt_ids bytea NOT NULL,
    request bytea DEFAULT '\x'::bytea NOT NULL,
    seq bigint DEFAULT nextval('public.turns_seq'::regclass)
);
CREATE TABLE public.view_grants (
    digest bytea NOT NULL,
    kind text NOT NULL,
    name text NOT NULL,
    created_at double precision NOT NULL,
    expires_at double precision
);
ALTER TABLE ONLY public.events ALTER COLUMN seq SET DEFAULT nextval('public.events_seq_seq'::regclass);
ALTER TABLE ONLY public.owners ALTER COLUMN number SET DEFAULT nextval('public.owners_number_seq'::regclass);
ALTER TABLE ONLY public.rewards ALTER COLUMN seq SET DEFAULT nextval('public.rewards_seq_seq'::regclass);
INSERT INTO public.agentic_proxy_schema VALUES (13);
INSERT INTO public.answers VALUES ('task/7-a', 0, 'done', '\x040000000000000001000000050000000100000002000000', 'tool_calls', '\xff616e737765720101010101010101010101010101010101010101010101010101010101010101010101010101010101', 0.5, 2, '\x0500000006000000', '\x000000beffff7fff', '\x7b22726f6c65223a22617373697374616e74227d', 1, '', NULL, NULL);
INSERT INTO public.answers VALUES ('task/7-a', 1, 'done', '\x040000000000000001000000050000000100000002000000', 'tool_calls', '\xff616e737765720101010101010101010101010101010101010101010101010101010101010101010101010101010101', 0.5, 2, '\x0500000006000000', '\x000000beffff7fff', '\x7b22726f6c65223a22617373697374616e74227d', 2, '', NULL, NULL);
INSERT INTO public.events VALUES (1, 'task/7-a', 1795480216.355593, 'refused', '\x7b22737461747573223a3430307d');
INSERT INTO public.owners VALUES (1, '2026-11-24 00:30:16.326523+00', NULL);
INSERT INTO public.rewards VALUES (1, 'task/7-a', 'verifier', 1, '\x7b227465737473223a302e357d', NULL, 0);
INSERT INTO public.sessions VALUES ('task/7-a', '\x333f123a01fa778f9d7e3d7c9d0ac6121156dfe569bf06fcc5d4be428339de51', 'train', 'open', 1.5, 99.5, NULL, '\x7b2274656d7065726174757265223a312e307d', 'default', '\x7b226d61785f7475726e73223a337d', '\x7b227461736b223a22c3bc227d', NULL, NULL, 0, NULL);
INSERT INTO public.sessions VALUES ('task/7-b', '\x859ab962cc35822ae99f56109a5769f041fe18cd5e83823a334171b428d09e6e', 'train', 'completed', 1.5, 99.5, 50, '\x7b2274656d7065726174757265223a312e307d', 'default', '\x7b226d61785f7475726e73223a337d', '\x7b227461736b223a22c3bc227d', NULL, NULL, 0, NULL);
INSERT INTO public.turns VALUES ('task/7-a', 0, 1, NULL, 0, NULL, '\x007265717565737401010101010101010101010101010101010101010101010101010101010101010101010101010101', '\x7b2274656d7065726174757265223a302e372c2273746f70223a5b2261225d7d', 'messages', 'sub-1', 12.25, '\x0100000002000000ffffff7f', '\x', 1);
INSERT INTO public.turns VALUES ('task/7-a', 1, 1, 0, 10, NULL, '\x007265717565737401010101010101010101010101010101010101010101010101010101010101010101010101010101', '\x7b2274656d7065726174757265223a302e372c2273746f70223a5b2261225d7d', 'messages', 'sub-1', 12.25, '\x0100000002000000ffffff7f', '\x', 2);
INSERT INTO public.turns VALUES ('task/7-a', 2, 1, 1, 20, 'edited', '\x007265717565737401010101010101010101010101010101010101010101010101010101010101010101010101010101', '\x7b2274656d7065726174757265223a302e372c2273746f70223a5b2261225d7d', 'messages', 'sub-1', 12.25, '\x0100000002000000ffffff7f', '\x', 3);
SELECT pg_catalog.setval('public.answers_seq', 2, true);
SELECT pg_catalog.setval('public.events_seq_seq', 1, true);
SELECT pg_catalog.setval('public.owners_number_seq', 1, true);
SELECT pg_catalog.setval('public.rewards_seq_seq', 1, true);
SELECT pg_catalog.setval('public.turns_seq', 3, true);
ALTER TABLE ONLY public.answers
    ADD CONSTRAINT answers_pkey PRIMARY KEY (session_id, idx);
ALTER TABLE ONLY public.deliveries
    ADD CONSTRAINT deliveries_pkey PRIMARY KEY (session_id, idx);
ALTER TABLE ONLY public.events
    ADD CONSTRAINT events_pkey PRIMARY KEY (seq);
ALTER TABLE ONLY public.marks
    ADD CONSTRAINT marks_pkey PRIMARY KEY (session_id, rule);
ALTER TABLE ONLY public.owners
    ADD CONSTRAINT owners_pkey PRIMARY KEY (number);
ALTER TABLE ONLY public.policies
    ADD CONSTRAINT policies_pkey PRIMARY KEY (name);
ALTER TABLE ONLY public.quotas
    ADD CONSTRAINT quotas_pkey PRIMARY KEY (name);
ALTER TABLE ONLY public.rewards
    ADD CONSTRAINT rewards_pkey PRIMARY KEY (session_id, reward_key);
ALTER TABLE ONLY public.search_rules
    ADD CONSTRAINT search_rules_pkey PRIMARY KEY (name);
ALTER TABLE ONLY public.sessions
    ADD CONSTRAINT sessions_key_hash_key UNIQUE (key_hash);
ALTER TABLE ONLY public.sessions
    ADD CONSTRAINT sessions_pkey PRIMARY KEY (session_id);
ALTER TABLE ONLY public.turns
    ADD CONSTRAINT turns_pkey PRIMARY KEY (session_id, idx);
ALTER TABLE ONLY public.view_grants
    ADD CONSTRAINT view_grants_pkey PRIMARY KEY (digest);
CREATE INDEX answers_by_seq ON public.answers USING btree (seq);
CREATE INDEX events_by_session ON public.events USING btree (session_id, seq);
CREATE INDEX forks_by_cause ON public.turns USING btree (fork_cause, started_at) WHERE (fork_cause IS NOT NULL);
CREATE INDEX sessions_by_creation ON public.sessions USING btree (created_at, session_id);
CREATE INDEX sessions_by_end ON public.sessions USING btree (COALESCE(completed_at, expires_at));
CREATE INDEX sessions_by_origin ON public.sessions USING btree (origin_session) WHERE (origin_session IS NOT NULL);
CREATE INDEX turns_by_seq ON public.turns USING btree (seq);
CREATE INDEX view_grants_by_name ON public.view_grants USING btree (name);
