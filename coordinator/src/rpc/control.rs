//! Beats, orders, the assignment, reports and fresh certificates, each for the identity that the
//! connection proved.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::{Stream, StreamExt as _};
use limb_common::clock;
use limb_common::report::Report;
use limb_common::wire::ms;
use limb_proto::v1;
use tokio_stream::wrappers::WatchStream;
use tonic::{Request, Response, Status};

use super::desk::{BeatVerdict, Desk};
use super::{caller, desk_status, home_status};
use crate::ca::{AgentKey, HomeCa};

pub(super) struct ControlService {
    ca: Arc<HomeCa>,
    desk: Arc<dyn Desk>,
}

impl ControlService {
    pub(super) fn new(ca: Arc<HomeCa>, desk: Arc<dyn Desk>) -> Self {
        Self { ca, desk }
    }
}

#[tonic::async_trait]
impl v1::control_server::Control for ControlService {
    type OrdersStream = Pin<Box<dyn Stream<Item = Result<v1::Order, Status>> + Send>>;

    async fn beat(&self, request: Request<v1::BeatRequest>) -> Result<Response<v1::BeatReply>, Status> {
        let who = caller(&request)?;
        let beat = request.into_inner();
        if beat.epoch != who.epoch.0 {
            return Err(Status::permission_denied("refused"));
        }
        let remaining = Duration::from_millis(beat.lease_remaining_ms);
        let reply = match self.desk.beat(&who, remaining).await.map_err(desk_status)? {
            BeatVerdict::Renewed { ttl } => v1::BeatReply { renewed: true, ttl_ms: ms(ttl) },
            BeatVerdict::Refused => v1::BeatReply { renewed: false, ttl_ms: 0 },
        };
        Ok(Response::new(reply))
    }

    async fn orders(
        &self,
        request: Request<v1::OrdersRequest>,
    ) -> Result<Response<Self::OrdersStream>, Status> {
        let who = caller(&request)?;
        let orders = self.desk.orders(&who).await.map_err(desk_status)?;
        // A watch keeps only the newest: a slow reader misses what no longer counts.
        let messages = WatchStream::new(orders).map(|order| Ok(v1::Order::from(&order)));
        Ok(Response::new(messages.boxed()))
    }

    async fn assignment(
        &self,
        request: Request<v1::AssignmentRequest>,
    ) -> Result<Response<v1::Assignment>, Status> {
        let who = caller(&request)?;
        let assignment = self.desk.assignment(&who).await.map_err(desk_status)?;
        Ok(Response::new(v1::Assignment::from(&assignment)))
    }

    async fn report(&self, request: Request<v1::ReportRequest>) -> Result<Response<v1::ReportReply>, Status> {
        let who = caller(&request)?;
        let report = Report::try_from(request.into_inner())
            .map_err(|error| Status::invalid_argument(error.to_string()))?;
        self.desk.report(&who, report).await.map_err(desk_status)?;
        Ok(Response::new(v1::ReportReply {}))
    }

    async fn renew_certificate(
        &self,
        request: Request<v1::RenewCertificateRequest>,
    ) -> Result<Response<v1::RenewCertificateReply>, Status> {
        let who = caller(&request)?;
        let key = AgentKey::from_csr(&request.into_inner().csr_der)
            .map_err(|_| Status::invalid_argument("the certificate request cannot be used"))?;
        let signed = self.ca.sign_agent(&key, &who, clock::unix_ms()).map_err(|error| home_status(&error))?;
        Ok(Response::new(v1::RenewCertificateReply {
            certificate_der: signed.der.into(),
            not_after_unix_ms: signed.not_after_unix_ms,
        }))
    }
}
