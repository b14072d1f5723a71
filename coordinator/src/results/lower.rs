//! What a lineage left under a destination, as a set that a new attempt can read.
//!
//! Never: list a file that is not (any more) exactly what limb published, judged by
//! (dev, ino, size, mtime). Such files are named instead.

use std::collections::{BTreeMap, HashMap};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use limb_common::chunk::chunk_count;
use limb_common::id::Digest;
use limb_common::manifest::{Draft, Inode, Manifest, ManifestBuilder, NewNode, NodeMeta};
use nix::errno::Errno;
use nix::fcntl::OFlag;

use super::disk::{Ident, Kind, look_at_open, open_beneath, open_in, open_root, user_xattrs};
use super::execute::Owned;
use super::lifecycle::{bytes_path, make_dest};
use super::names::ResultPath;
use super::part::value_at;
use super::table::{self, Name};
use super::{ResultsError, ResultsHome};

/// A set, and where the bytes of its files lie.
#[derive(Debug)]
pub struct Lower {
    pub manifest: Manifest,
    pub files: Vec<LowerFile>,
    /// Changed or removed by the owner since: paths below the destination, lossy.
    pub left_out: Vec<String>,
}

/// One file of a [`Lower`], and the state of it that the manifest speaks of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LowerFile {
    pub inode: Inode,
    pub path: PathBuf,
    pub dev: u64,
    pub ino: u64,
    pub size: u64,
    pub mtime_ns: i64,
    pub ctime_ns: i64,
}

impl ResultsHome {
    /// What earlier attempts journaled under this destination and still stands.
    ///
    /// # Errors
    /// [`ResultsError::Destination`] or a failure of the table.
    pub async fn lower(&self, dest: &Path) -> Result<Lower, ResultsError> {
        let dest = dest.to_owned();
        self.blocking(move |inner| {
            let key = make_dest(&dest)?;
            let wanted = key.clone();
            let names = inner.database.read_blocking(move |db| table::names_of_dest(db, &wanted))?;
            let (lower, inodes) = Collector::new(&key, &dest)?.collect(names);
            let manifest = lower.manifest.id();
            inner.database.write_blocking(move |db| table::put_lower(db, manifest, &inodes))?;
            Ok(lower)
        })
        .await
    }
}

struct Collector {
    root: std::os::fd::OwnedFd,
    dest: PathBuf,
    builder: ManifestBuilder,
    directories: BTreeMap<Vec<u8>, Draft>,
    drafts: HashMap<Ident, Draft>,
    files: Vec<(Draft, Vec<u8>, LowerFile)>,
    left_out: Vec<String>,
}

impl Collector {
    fn new(key: &[u8], shown: &Path) -> Result<Self, ResultsError> {
        let failed = |source| ResultsError::Destination { path: shown.to_owned(), source };
        let dest = bytes_path(key);
        let root = open_root(&dest).map_err(failed)?;
        let seen = look_at_open(&root).map_err(failed)?;
        let builder = ManifestBuilder::new(NodeMeta {
            mode: seen.mode,
            mtime_ns: seen.mtime_ns,
            xattrs: BTreeMap::new(),
        });
        let directories = BTreeMap::from([(Vec::new(), builder.root())]);
        Ok(Self {
            root,
            dest,
            builder,
            directories,
            drafts: HashMap::new(),
            files: Vec::new(),
            left_out: Vec::new(),
        })
    }

    fn collect(mut self, names: Vec<Name>) -> (Lower, Vec<(u64, Vec<u8>, Ident)>) {
        for name in names {
            // A file system that cannot be asked about one name leaves that name out.
            if !self.add(&name).unwrap_or(false) {
                self.left_out.push(String::from_utf8_lossy(&name.path).into_owned());
            }
        }
        let (manifest, order) = self.builder.build();
        let inodes = self.files.iter().map(|(draft, path, file)| {
            (order.inode(*draft).0, path.clone(), Ident { dev: file.dev, ino: file.ino })
        });
        let inodes = inodes.collect();
        let files = self
            .files
            .into_iter()
            .map(|(draft, _, file)| LowerFile { inode: order.inode(draft), ..file })
            .collect();
        (Lower { manifest, files, left_out: self.left_out }, inodes)
    }

    /// `false`: not what was published.
    fn add(&mut self, name: &Name) -> Result<bool, Errno> {
        let path = ResultPath::parse(&name.path)?;
        let parent = match open_beneath(&self.root, path.parent()) {
            Err(Errno::ENOENT | Errno::ENOTDIR | Errno::ELOOP) => return Ok(false),
            other => other?,
        };
        let Some(seen) = super::disk::look(&parent, path.name())? else { return Ok(false) };
        if !Owned::from(&name.what).matches(&seen) || name.what.open {
            return Ok(false);
        }
        let mut meta = NodeMeta { mode: name.what.mode, mtime_ns: seen.mtime_ns, xattrs: BTreeMap::new() };
        match seen.kind {
            Kind::Directory => {
                let draft = self.directory(path.as_bytes(), Some(meta));
                return Ok(draft.is_some());
            }
            Kind::Symlink => {
                let Some(directory) = self.directory(path.parent(), None) else { return Ok(false) };
                let node = NewNode::Symlink { target: name.what.values.clone() };
                return Ok(self.builder.add(directory, path.name(), node, meta).is_ok());
            }
            Kind::File => {}
            Kind::Other => return Ok(false),
        }
        let Some(directory) = self.directory(path.parent(), None) else { return Ok(false) };
        if let Some(&draft) = self.drafts.get(&seen.ident) {
            return Ok(self.builder.link(directory, path.name(), draft).is_ok());
        }
        let opened = open_in(&parent, path.name(), OFlag::O_RDONLY)?;
        meta.xattrs = user_xattrs(&opened).into_iter().collect();
        let chunks: Vec<Option<Digest>> =
            (0..chunk_count(seen.size)).map(|index| value_at(&name.what.values, index)).collect();
        if chunks.iter().any(Option::is_none) {
            return Ok(false);
        }
        let node = NewNode::File { size: seen.size, chunks };
        let Ok(draft) = self.builder.add(directory, path.name(), node, meta) else { return Ok(false) };
        self.drafts.insert(seen.ident, draft);
        let stat = opened.metadata().map_err(|_| Errno::EIO)?;
        let file = LowerFile {
            inode: Inode(0),
            path: self.dest.join(bytes_path(path.as_bytes())),
            dev: seen.ident.dev,
            ino: seen.ident.ino,
            size: seen.size,
            mtime_ns: seen.mtime_ns,
            ctime_ns: stat.ctime().saturating_mul(1_000_000_000).saturating_add(stat.ctime_nsec()),
        };
        self.files.push((draft, path.as_bytes().to_vec(), file));
        Ok(true)
    }

    /// A directory and those above it. Rows come in order of path, so a directory's own row
    /// comes before what is in it; one without a row gets plain attributes.
    fn directory(&mut self, path: &[u8], meta: Option<NodeMeta>) -> Option<Draft> {
        if let Some(&draft) = self.directories.get(path) {
            return Some(draft);
        }
        let cut = path.iter().rposition(|&b| b == b'/');
        let (above, name) = cut.map_or((&[][..], path), |at| (&path[..at], &path[at + 1..]));
        let parent = self.directory(above, None)?;
        let meta = meta.unwrap_or_else(|| NodeMeta { mode: 0o755, ..NodeMeta::default() });
        let draft = self.builder.add(parent, name, NewNode::Directory, meta).ok()?;
        self.directories.insert(path.to_vec(), draft);
        Some(draft)
    }
}
