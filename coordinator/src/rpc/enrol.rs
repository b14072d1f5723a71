//! Enrolment: a token and a key become a certificate. The desk spends the token; here the
//! message is checked and the certificate signed.

use std::sync::Arc;

use limb_common::clock;
use limb_common::id::Digest;
use limb_common::wire::PROTOCOL;
use limb_proto::v1;
use tonic::{Request, Response, Status};

use super::desk::{Desk, EnrolmentRequest};
use super::{desk_status, home_status};
use crate::ca::{AgentKey, HomeCa};

const TOKEN_BYTES: usize = 32;
/// A boot id is a UUID, a version a few words.
const MAX_TEXT_BYTES: usize = 128;

pub(super) struct EnrolService {
    ca: Arc<HomeCa>,
    desk: Arc<dyn Desk>,
}

impl EnrolService {
    pub(super) fn new(ca: Arc<HomeCa>, desk: Arc<dyn Desk>) -> Self {
        Self { ca, desk }
    }
}

#[tonic::async_trait]
impl v1::enrol_server::Enrol for EnrolService {
    async fn enrol(&self, request: Request<v1::EnrolRequest>) -> Result<Response<v1::EnrolReply>, Status> {
        let message = request.into_inner();
        if message.protocol != PROTOCOL {
            return Err(Status::failed_precondition(format!(
                "home speaks protocol {PROTOCOL}, the agent {}; hint: start the agent that came with this home",
                message.protocol
            )));
        }
        if message.token.len() != TOKEN_BYTES
            || message.boot_id.len() > MAX_TEXT_BYTES
            || message.agent_version.len() > MAX_TEXT_BYTES
        {
            return Err(Status::invalid_argument("not an enrolment"));
        }
        let key = AgentKey::from_csr(&message.csr_der)
            .map_err(|_| Status::invalid_argument("the certificate request cannot be used"))?;
        let who = self
            .desk
            .enrol(EnrolmentRequest {
                token_hash: Digest::of(&message.token),
                key_hash: key.hash(),
                boot_id: message.boot_id,
                agent_version: message.agent_version,
            })
            .await
            .map_err(desk_status)?;
        let now = clock::unix_ms();
        let signed = self.ca.sign_agent(&key, &who, now).map_err(|error| home_status(&error))?;
        tracing::info!(run = %who.run, attempt = %who.attempt, epoch = %who.epoch, "an agent enrolled");
        Ok(Response::new(v1::EnrolReply {
            certificate_der: signed.der.into(),
            epoch: who.epoch.0,
            home_unix_ms: now,
            certificate_not_after_unix_ms: signed.not_after_unix_ms,
        }))
    }
}
