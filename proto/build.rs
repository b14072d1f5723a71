//! Compiles the `.proto` files with protox, so that no `protoc` has to be installed.
fn main() -> Result<(), Box<dyn std::error::Error>> {
    let files = ["limb/v1/agent.proto", "limb/v1/owner.proto"];
    for file in files {
        println!("cargo:rerun-if-changed={file}");
    }
    let descriptors = protox::compile(files, ["."])?;
    tonic_prost_build::configure()
        .bytes(".")
        // Secrets and tokens travel in these: no derived Debug may print them.
        .skip_debug([".limb.v1.EnvVar", ".limb.v1.EnvPair", ".limb.v1.EnrolRequest"])
        .compile_fds(descriptors)?;
    Ok(())
}
