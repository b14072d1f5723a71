//! The tree against a plain directory, and the outbox against a home that applies the journal.
