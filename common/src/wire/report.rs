//! Reports.

use std::time::Duration;

use limb_proto::v1;
use limb_proto::v1::report_request::Event;

use super::{WireError, ms};
use crate::report::{BoxEvent, DrainReport, EndedBy, JobEnd, JobStep, Report};

/// Most names in a drain report; the rest is counted by the last entry.
const MAX_NAMES: usize = 1000;
/// Longest name in bytes: both lists together stay under the limit of a message.
const MAX_NAME_BYTES: usize = 1024;
/// Longest other text in bytes.
const MAX_TEXT_BYTES: usize = 4096;

impl From<&Report> for v1::ReportRequest {
    fn from(report: &Report) -> Self {
        let event = match &report.event {
            BoxEvent::BootPhasePassed { name, took } => {
                Event::BootPhase(v1::BootPhase { name: name.clone(), took_ms: ms(*took) })
            }
            BoxEvent::SetupStarted => Event::SetupStarted(v1::SetupStarted {}),
            BoxEvent::JobStarted => Event::JobStarted(v1::JobStarted {}),
            BoxEvent::JobEnded(end) => Event::JobEnded(end.into()),
            BoxEvent::ResultsDrained(drained) => Event::Drained(drained.into()),
            BoxEvent::Noticed { kind, text } => {
                Event::Notice(v1::Notice { kind: kind.clone(), text: capped(text) })
            }
        };
        Self { seq: report.seq, box_uptime_ms: ms(report.box_uptime), event: Some(event) }
    }
}

impl TryFrom<v1::ReportRequest> for Report {
    type Error = WireError;

    fn try_from(message: v1::ReportRequest) -> Result<Self, WireError> {
        if message.seq == 0 {
            return Err(WireError::new("report.seq", "counts from 1"));
        }
        let event = match message.event.ok_or_else(|| WireError::missing("report.event"))? {
            Event::BootPhase(phase) => BoxEvent::BootPhasePassed {
                name: capped(&phase.name),
                took: Duration::from_millis(phase.took_ms),
            },
            Event::SetupStarted(v1::SetupStarted {}) => BoxEvent::SetupStarted,
            Event::JobStarted(v1::JobStarted {}) => BoxEvent::JobStarted,
            Event::JobEnded(end) => BoxEvent::JobEnded(end.try_into()?),
            Event::Drained(drained) => BoxEvent::ResultsDrained(drained.into()),
            Event::Notice(notice) => {
                BoxEvent::Noticed { kind: capped(&notice.kind), text: capped(&notice.text) }
            }
        };
        Ok(Self { seq: message.seq, box_uptime: Duration::from_millis(message.box_uptime_ms), event })
    }
}

impl From<&JobEnd> for v1::JobEnded {
    fn from(end: &JobEnd) -> Self {
        use v1::job_ended::{How, Step};
        let step = match end.step {
            JobStep::Prepare => Step::Prepare,
            JobStep::Setup => Step::Setup,
            JobStep::Run => Step::Run,
        };
        let how = match &end.how {
            EndedBy::Exit(code) => How::ExitCode(*code),
            EndedBy::Signal(signal) => How::Signal(*signal),
            // The code leads the text: a shell's two codes are all that there are.
            EndedBy::CouldNotStart { code, why } => How::CouldNotStart(format!("{code} {}", capped(why))),
        };
        Self { step: step.into(), how: Some(how), oom_killed: end.oom_killed, stopped: end.stopped }
    }
}

impl TryFrom<v1::JobEnded> for JobEnd {
    type Error = WireError;

    fn try_from(message: v1::JobEnded) -> Result<Self, WireError> {
        use v1::job_ended::{How, Step};
        let unknown = || WireError::new("job_ended.step", format!("{} is unknown", message.step));
        let step = match Step::try_from(message.step).map_err(|_| unknown())? {
            Step::Unspecified => return Err(unknown()),
            Step::Prepare => JobStep::Prepare,
            Step::Setup => JobStep::Setup,
            Step::Run => JobStep::Run,
        };
        let how = match message.how.ok_or_else(|| WireError::missing("job_ended.how"))? {
            How::ExitCode(code) => EndedBy::Exit(code),
            How::Signal(signal) => EndedBy::Signal(signal),
            How::CouldNotStart(text) => {
                let (code, why) = text.split_once(' ').unwrap_or((&text, ""));
                let code = code
                    .parse()
                    .map_err(|_| WireError::new("job_ended.could_not_start", "must begin with a code"))?;
                EndedBy::CouldNotStart { code, why: capped(why) }
            }
        };
        Ok(Self { step, how, oom_killed: message.oom_killed, stopped: message.stopped })
    }
}

impl From<&DrainReport> for v1::ResultsDrained {
    fn from(drained: &DrainReport) -> Self {
        Self {
            complete: drained.complete,
            unsaved: capped_names(&drained.unsaved),
            bytes_sent: drained.bytes_sent,
            files_published: drained.files_published,
            workdir_changes_left: capped_names(&drained.workdir_changes_left),
        }
    }
}

impl From<v1::ResultsDrained> for DrainReport {
    fn from(message: v1::ResultsDrained) -> Self {
        Self {
            complete: message.complete,
            unsaved: capped_names(&message.unsaved),
            bytes_sent: message.bytes_sent,
            files_published: message.files_published,
            workdir_changes_left: capped_names(&message.workdir_changes_left),
        }
    }
}

fn capped_names(names: &[String]) -> Vec<String> {
    let mut kept: Vec<_> = names.iter().take(MAX_NAMES).map(|name| capped_to(name, MAX_NAME_BYTES)).collect();
    if names.len() > MAX_NAMES {
        kept.push(format!("… and {} more", names.len() - MAX_NAMES));
    }
    kept
}

fn capped(text: &str) -> String {
    capped_to(text, MAX_TEXT_BYTES)
}

fn capped_to(text: &str, bytes: usize) -> String {
    text[..text.floor_char_boundary(bytes)].to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_travel_unchanged() {
        let end =
            |how| BoxEvent::JobEnded(JobEnd { step: JobStep::Run, how, oom_killed: true, stopped: false });
        for event in [
            BoxEvent::BootPhasePassed { name: "mounted".into(), took: Duration::from_millis(7) },
            BoxEvent::SetupStarted,
            BoxEvent::JobStarted,
            end(EndedBy::Exit(255)),
            BoxEvent::JobEnded(JobEnd {
                step: JobStep::Prepare,
                how: EndedBy::CouldNotStart { code: 126, why: "could not mount /data".into() },
                oom_killed: false,
                stopped: false,
            }),
            end(EndedBy::Signal(9)),
            end(EndedBy::CouldNotStart { code: 127, why: "no such program".into() }),
            BoxEvent::ResultsDrained(DrainReport {
                complete: false,
                unsaved: vec!["a".into()],
                bytes_sent: 3,
                files_published: 1,
                workdir_changes_left: vec![],
            }),
            BoxEvent::Noticed { kind: "source-changed".into(), text: "data/x".into() },
        ] {
            let report = Report { seq: 3, box_uptime: Duration::from_millis(9), event };
            assert_eq!(Report::try_from(v1::ReportRequest::from(&report)).unwrap(), report);
        }
    }

    #[test]
    fn a_hostile_report_is_refused_or_cut() {
        assert!(Report::try_from(v1::ReportRequest { seq: 1, ..Default::default() }).is_err());
        let notice = Event::Notice(v1::Notice { kind: "k".into(), text: "ä".repeat(1 << 20) });
        assert!(
            Report::try_from(v1::ReportRequest { seq: 0, event: Some(notice.clone()), ..Default::default() })
                .is_err()
        );
        let message = v1::ReportRequest { seq: 1, box_uptime_ms: u64::MAX, event: Some(notice) };
        let BoxEvent::Noticed { text, .. } = Report::try_from(message).unwrap().event else { panic!() };
        assert!(text.len() <= MAX_TEXT_BYTES);
        let bad_step = v1::JobEnded { step: 7, ..Default::default() };
        assert!(JobEnd::try_from(bad_step).is_err());
    }
}
