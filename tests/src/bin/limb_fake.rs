//! The whole `limb` program with the provider that misbehaves on demand beside the embedded one.

use std::process::ExitCode;
use std::sync::Arc;

use limb::provider::Provider;
use limb::provider::local::Local;
use limb::serve::Edges;
use limb_tests::fake_provider::FakeProvider;

fn main() -> ExitCode {
    limb::cli::main(&Edges {
        providers: Box::new(|settings| {
            let fake = FakeProvider::new(&settings.state_dir, settings.agent.clone());
            // Each has boxes of its own, so that neither lists the other's.
            let local = Local::new(settings.state_dir.join("local-beside-fake"), settings.agent.clone());
            vec![Arc::new(fake) as Arc<dyn Provider>, Arc::new(local)]
        }),
    })
}
