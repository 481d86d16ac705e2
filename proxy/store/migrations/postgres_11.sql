-- The experts that the router of each layer chose, as .npy; NULL: not recorded.
ALTER TABLE answers ADD COLUMN routed_experts BYTEA;
