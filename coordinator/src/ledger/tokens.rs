//! Enrolment tokens: hashed, single use, kept for ever as tombstones.

use limb_common::id::{AttemptNumber, Digest, RunId};
use rusqlite::{OptionalExtension as _, params};

use super::{AttemptRow, Ledger, LedgerError, attempts, corrupt, sql, unsql};

/// A token was good.
#[derive(Clone, Debug)]
pub struct Spent {
    pub attempt: AttemptRow,
    /// The same key asked before: a reply was lost on the way.
    pub again: bool,
}

/// A token was not good.
#[derive(Clone, Debug)]
pub enum TokenAlarm {
    Unknown,
    Expired,
    /// Another key spent it: somebody else has read the boot settings.
    OtherKey {
        run: RunId,
        attempt: AttemptNumber,
    },
}

impl Ledger {
    /// Binds a token to a key. Durable before it answers.
    ///
    /// # Errors
    /// The database's.
    pub async fn spend_token(
        &self,
        token_hash: Digest,
        key_hash: Digest,
    ) -> Result<Result<Spent, TokenAlarm>, LedgerError> {
        let now = self.now_unix_ms();
        self.write(move |tx| {
            let found: Option<(String, u32, i64, Option<Vec<u8>>)> = tx
                .query_row(
                    "SELECT run, attempt, expires_unix_ms, key_hash FROM tokens WHERE token_hash = ?1",
                    [token_hash.0.as_slice()],
                    |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?, row.get(3)?)),
                )
                .optional()?;
            let Some((run, number, expires, bound)) = found else { return Ok(Err(TokenAlarm::Unknown)) };
            let run: RunId = run.parse().map_err(corrupt("run id"))?;
            let number = AttemptNumber(number);
            let again = match bound {
                Some(bound) if bound == key_hash.0 => true,
                Some(_) => return Ok(Err(TokenAlarm::OtherKey { run, attempt: number })),
                None if now >= unsql(expires) => return Ok(Err(TokenAlarm::Expired)),
                None => {
                    tx.execute(
                        "UPDATE tokens SET key_hash = ?2, spent_unix_ms = ?3 WHERE token_hash = ?1",
                        params![token_hash.0.as_slice(), key_hash.0.as_slice(), sql(now)],
                    )?;
                    false
                }
            };
            let attempt = attempts::load(tx, &run, number)?;
            Ok(Ok(Spent { attempt, again }))
        })
        .await
    }
}
