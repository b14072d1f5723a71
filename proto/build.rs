//! Compiles the `.proto` files with protox, so that no `protoc` has to be installed.
fn main() -> Result<(), Box<dyn std::error::Error>> {
    let files = ["limb/v1/agent.proto", "limb/v1/owner.proto"];
    for file in files {
        println!("cargo:rerun-if-changed={file}");
    }
    let descriptors = protox::compile(files, ["."])?;
    write_rpc_paths(&descriptors)?;
    tonic_prost_build::configure()
        .bytes(".")
        // Secrets and tokens travel in these: no derived Debug may print them.
        .skip_debug([".limb.v1.EnvVar", ".limb.v1.EnvPair", ".limb.v1.EnrolRequest"])
        .compile_fds(descriptors)?;
    Ok(())
}

/// Every RPC of every service, so that a test can ask of each what identity it requires.
fn write_rpc_paths(
    descriptors: &tonic_prost_build::FileDescriptorSet,
) -> Result<(), Box<dyn std::error::Error>> {
    let mut text = String::from(
        "/// `/package.Service/Method` of every RPC in the `.proto` files.\npub const RPC_PATHS: &[&str] = &[\n",
    );
    for file in &descriptors.file {
        for service in &file.service {
            for method in &service.method {
                text += &format!("    \"/{}.{}/{}\",\n", file.package(), service.name(), method.name());
            }
        }
    }
    text += "];\n";
    std::fs::write(std::path::Path::new(&std::env::var("OUT_DIR")?).join("rpc_paths.rs"), text)?;
    Ok(())
}
