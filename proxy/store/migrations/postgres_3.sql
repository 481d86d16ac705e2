-- Whether an answer arrived at its agent. A row of its own, because answers are large.
CREATE TABLE deliveries (
    session_id TEXT COLLATE "C" NOT NULL,
    idx INTEGER NOT NULL,
    arrived INTEGER NOT NULL,
    PRIMARY KEY (session_id, idx)
);

-- Of answers that earlier programs recorded nothing is known; they are not given again.
INSERT INTO deliveries (session_id, idx, arrived)
SELECT session_id, idx, 1 FROM answers WHERE status = 'done';
