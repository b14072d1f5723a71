use super::*;

fn sources(dir: &Path, flags: &[&str], env: &[(&str, &str)]) -> Sources {
    let mut all = vec![
        ("XDG_CONFIG_HOME".to_owned(), dir.join("config").into()),
        ("XDG_STATE_HOME".to_owned(), dir.join("state").into()),
    ];
    all.extend(env.iter().map(|(name, value)| ((*name).to_owned(), OsString::from(value))));
    Sources {
        config: None,
        flags: flags.iter().map(|flag| (*flag).to_owned()).collect(),
        env: all,
        bin_dir: Some("/opt/limb".into()),
    }
}

fn home_with(toml: &str) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir_all(dir.path().join("config/limb")).unwrap();
    std::fs::write(dir.path().join("config/limb/limb.toml"), toml).unwrap();
    dir
}

fn origin<'a>(settings: &'a Settings, key: &str) -> &'a Origin {
    &settings.shown.iter().find(|shown| shown.key == key).unwrap().origin
}

#[test]
fn flag_beats_environment_beats_file_beats_default() {
    let dir = home_with(
        "# mine\nlisten = \"127.0.0.1:7000\"\nprovider = \"a\"\nlog = \"a\"\nlog_quota = 4096\nidle_exit = \"never\"\ncompress = \"off\"\n",
    );
    let env = [("LIMB_PROVIDER", "b"), ("LIMB_LOG", "b"), ("LIMB_AGENT", "")];
    let settings = Settings::load(&sources(dir.path(), &["log=x", "log=c"], &env)).unwrap();
    assert_eq!((settings.log.as_str(), origin(&settings, "log")), ("c", &Origin::Flag));
    assert_eq!(settings.provider, "b");
    assert_eq!(origin(&settings, "provider"), &Origin::Environment("LIMB_PROVIDER"));
    assert_eq!(settings.listen.port(), 7000);
    assert!(matches!(origin(&settings, "listen"), Origin::File { line: 2, .. }));
    assert_eq!(settings.log_quota_bytes, 4096);
    assert_eq!(settings.idle_exit, None);
    assert!(!settings.compress);
    assert_eq!(
        (settings.agent.as_path(), origin(&settings, "agent")),
        (Path::new("/opt/limb/limb-agent"), &Origin::Default)
    );
    assert_eq!(settings.state_dir, dir.path().join("state/limb"));
    assert_eq!(settings.socket, dir.path().join("state/limb/limb.sock"));
    assert_eq!(settings.advertise, None);
    let again = Sources { flags: Vec::new(), ..sources(dir.path(), &[], &env) };
    let flags = settings.as_flags().into_iter().filter(|flag| flag != "--set").collect();
    let child = Settings::load(&Sources { flags, ..again }).unwrap();
    assert_eq!((child.log, child.provider, child.listen), (settings.log, settings.provider, settings.listen));
}

#[test]
fn what_is_not_known_is_an_error_with_its_place() {
    let error = |toml: &str, flags: &[&str]| {
        let dir = home_with(toml);
        let text = Settings::load(&sources(dir.path(), flags, &[])).unwrap_err().to_string();
        text.replace(&dir.path().display().to_string(), "")
    };
    insta::assert_snapshot!(error("log = \"x\"\nlisen = \"a\"\n", &[]), @"/config/limb/limb.toml:2: unknown key `lisen`; hint: did you mean `listen`?");
    insta::assert_snapshot!(error("listen = 7\n", &[]), @r#"`listen` (from /config/limb/limb.toml:1): "7" is not an address; hint: write it like 127.0.0.1:7433"#);
    insta::assert_snapshot!(error("log = true\n", &[]), @"/config/limb/limb.toml:1: `log` must be a text in quotes");
    insta::assert_snapshot!(error("", &["agent"]), @r#"--set "agent": not a setting; hint: write it like --set provider=local"#);
    insta::assert_snapshot!(error("", &["agent=x"]), @r#"`agent` (from --set): "x" is not an absolute path"#);
    insta::assert_snapshot!(error("", &["idle_exit=5"]), @r#"`idle_exit` (from --set): "5" is not a duration; hint: write it like 90s, 2m, 6h or 1h30m"#);
    insta::assert_snapshot!(error("", &["compress=yes"]), @r#"`compress` (from --set): "yes" is neither `on` nor `off`"#);
    let broken = error("log = \n", &[]);
    assert!(broken.starts_with("/config/limb/limb.toml:1: not valid TOML: "), "{broken}");
}

#[test]
fn a_named_file_must_be_there() {
    let dir = tempfile::tempdir().unwrap();
    Settings::load(&sources(dir.path(), &[], &[])).unwrap();
    let named = Sources { config: Some(dir.path().join("x.toml")), ..sources(dir.path(), &[], &[]) };
    assert!(matches!(Settings::load(&named), Err(SettingsError::Unreadable { .. })));
    assert!(matches!(Settings::load(&Sources::default()), Err(SettingsError::NoHome)));
}

#[test]
fn every_setting_has_its_variable_in_the_list() {
    for (_, variable, _) in KEYS {
        assert!(env_names::OURS.iter().any(|(name, _)| *name == variable), "{variable}");
    }
}
