//! A proxy in front of a server, that does to the traffic what networks do.
//!
//! It reads RESP in both directions, so "the second reply to an EVALSHA" is exact. It keeps what
//! TCP keeps: bytes stay in order, and a connection that lost some never goes on in that
//! direction. When a client closes, what it had sent still arrives, however late.
//!
//! The proxy runs on a thread of its own: a test that keeps its runtime busy, or pauses its clock,
//! does not disturb the faults.

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc as sync_mpsc};
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::tcp::{ReadHalf, WriteHalf};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

use super::cli::Wire;
use super::resp::{self, Reply};
use super::secs;
use super::server::free_port;

/// A fault as a value: it can be chosen at random, printed and kept.
#[derive(Clone, Debug, PartialEq)]
pub enum Fault {
    /// Everything takes this much longer, until [`Proxy::heal`].
    Delay {
        requests: Duration,
        replies: Duration,
    },
    /// No request arrives until [`Proxy::heal`]; then all do.
    HoldRequests,
    /// No reply and no message arrives until [`Proxy::heal`]; then all do.
    HoldReplies,
    /// The connections there are, and those made until [`Proxy::heal`], stay open, and silent for
    /// ever: nothing arrives at either end.
    BlackHole,
    /// As `BlackHole`, but the server's end of the connections is closed.
    HalfOpen,
    /// New connections are refused until [`Proxy::heal`]. Those there are go on.
    Refuse,
    /// The connections there are end now. New ones are fine.
    Cut(Then),
    /// The `nth` message of this kind from now on is singled out, once.
    One {
        leg: Leg,
        of: Matching,
        nth: usize,
        act: Act,
    },
}

/// What passes the proxy.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Leg {
    Request,
    /// An answer, picked by its *request*. A confirmation answers a SUBSCRIBE.
    Reply,
    /// What comes unasked, picked by its own bytes: messages of channels, pushes.
    Message,
}

/// What happens to a singled out message.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Act {
    /// It never arrives, and this becomes of the connection.
    Swallow(Then),
    /// It waits for [`Injected::release`] or [`Proxy::heal`], and what follows it in its direction
    /// on the same connection waits behind it.
    Hold,
    /// It takes this much longer, and so does what follows it.
    Delay(Duration),
}

/// What becomes of a connection.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Then {
    /// FIN.
    Close,
    /// RST.
    Reset,
    /// It stays open; the direction that lost something loses all that follows, for ever. The
    /// other direction goes on.
    Discard,
}

/// Which messages are meant.
#[derive(Clone, PartialEq)]
pub enum Matching {
    Any,
    /// Those with these bytes anywhere: a key, an owner id, the hash of a script.
    Bytes(Vec<u8>),
    /// Requests with this command, in any case.
    Command(String),
}

/// Messages with these bytes anywhere in them.
pub fn bytes(part: impl AsRef<[u8]>) -> Matching {
    Matching::Bytes(part.as_ref().to_vec())
}

/// Requests with exactly this command.
pub fn command(name: &str) -> Matching {
    Matching::Command(name.to_owned())
}

impl Fault {
    /// The next request that matches.
    pub const fn request(of: Matching, act: Act) -> Self {
        Self::One {
            leg: Leg::Request,
            of,
            nth: 1,
            act,
        }
    }

    /// The next reply to a request that matches; that request may be on its way already.
    pub const fn reply(of: Matching, act: Act) -> Self {
        Self::One {
            leg: Leg::Reply,
            of,
            nth: 1,
            act,
        }
    }

    /// The next message of a channel that matches.
    pub const fn message(of: Matching, act: Act) -> Self {
        Self::One {
            leg: Leg::Message,
            of,
            nth: 1,
            act,
        }
    }

    /// Not the next, but the `nth`, counted from 1 and over all connections.
    #[must_use]
    pub fn nth(mut self, n: usize) -> Self {
        match &mut self {
            Self::One { nth, .. } => *nth = n,
            other => panic!("{other:?} does not count"),
        }
        self
    }
}

impl Matching {
    fn fits(&self, wire: &[u8]) -> bool {
        match self {
            Self::Any => true,
            Self::Bytes(part) => contains(wire, part),
            Self::Command(name) => command_of(wire).eq_ignore_ascii_case(name.as_bytes()),
        }
    }
}

impl fmt::Debug for Matching {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Any => f.write_str("any"),
            Self::Bytes(part) => write!(f, "bytes(\"{}\")", part.escape_ascii()),
            Self::Command(name) => write!(f, "command({name:?})"),
        }
    }
}

/// The proxy. Dropping it closes everything.
pub struct Proxy {
    port: u16,
    shared: Arc<Shared>,
    listening: mpsc::UnboundedSender<Listening>,
}

/// A fault that was injected.
#[derive(Clone)]
pub struct Injected {
    fault: Fault,
    mark: Arc<Mark>,
}

/// Switches the listener on or off, and tells when that is done.
struct Listening {
    on: bool,
    done: sync_mpsc::Sender<()>,
}

impl Proxy {
    /// Starts a proxy in front of the server on `target`.
    pub fn start(target: u16) -> Self {
        let shared = Arc::new(Shared::new(target));
        let (listening, orders) = mpsc::unbounded_channel();
        let (ready, port) = sync_mpsc::channel();
        let on_thread = Arc::clone(&shared);
        let work = move || {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build();
            runtime.unwrap().block_on(async {
                let (listener, port) = listen_anywhere();
                ready.send(port).unwrap();
                accept_all(on_thread, listener, port, orders).await;
            });
        };
        std::thread::Builder::new()
            .name("fault proxy".into())
            .spawn(work)
            .unwrap();
        let port = port.recv().expect("the proxy found no port");
        Self {
            port,
            shared,
            listening,
        }
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    /// `redis://127.0.0.1:<port>`.
    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// Lets a fault loose. It holds for everything that is sent after the call.
    pub fn inject(&self, fault: Fault) -> Injected {
        let mark = Arc::new(Mark::new());
        let injected = Injected {
            fault: fault.clone(),
            mark: Arc::clone(&mark),
        };
        let shared = &self.shared;
        match fault {
            Fault::Delay { requests, replies } => shared.link.send_modify(|link| {
                link.requests.delay = requests;
                link.replies.delay = replies;
            }),
            Fault::HoldRequests => shared.link.send_modify(|link| link.requests.hold = true),
            Fault::HoldReplies => shared.link.send_modify(|link| link.replies.hold = true),
            Fault::BlackHole => shared.lock().doom(Fate::Silent, true),
            Fault::HalfOpen => shared.lock().doom(Fate::HalfOpen, true),
            Fault::Cut(then) => shared.lock().doom(Fate::from(then), false),
            Fault::Refuse => self.listen(false),
            Fault::One { leg, of, nth, act } => {
                assert!(nth > 0, "messages are counted from 1");
                shared.lock().rules.push(Rule {
                    leg,
                    of,
                    left: nth,
                    act,
                    mark,
                });
                return injected;
            }
        }
        mark.hit();
        injected
    }

    /// Stays open and discards all bytes: see [`Fault::BlackHole`].
    pub fn black_hole(&self) {
        self.inject(Fault::BlackHole);
    }

    /// Ends every connection now; new ones are fine.
    pub fn cut(&self, then: Then) {
        self.inject(Fault::Cut(then));
    }

    /// Refuses new connections.
    pub fn refuse(&self) {
        self.inject(Fault::Refuse);
    }

    /// Ends all faults: what was held or delayed arrives at once, what was lost stays lost.
    pub fn heal(&self) {
        {
            let mut state = self.shared.lock();
            state.fate_of_new = Fate::Well;
            state.rules.clear();
            for mark in state.holding.drain(..) {
                mark.released.send_replace(true);
            }
        }
        self.shared.link.send_modify(|link| {
            let times_healed = link.times_healed + 1;
            *link = Link {
                times_healed,
                ..Link::default()
            };
        });
        self.listen(true);
    }

    /// Connections that clients have open.
    pub fn connections(&self) -> usize {
        let mut state = self.shared.lock();
        state.forget_closed();
        state.fates.len()
    }

    /// The requests that were seen, oldest first (the last ten thousand).
    pub fn requests(&self, of: &Matching) -> Vec<Vec<u8>> {
        let state = self.shared.lock();
        state
            .seen
            .iter()
            .filter(|wire| of.fits(wire))
            .map(|wire| wire.to_vec())
            .collect()
    }

    /// How many requests that match were seen.
    pub fn count(&self, of: &Matching) -> usize {
        self.shared
            .lock()
            .seen
            .iter()
            .filter(|wire| of.fits(wire))
            .count()
    }

    /// Sends the newest request that matches once more, on a connection of its own straight to the
    /// server: a copy that was late in the network.
    ///
    /// # Panics
    ///
    /// If no request matches.
    pub async fn replay_last(&self, of: &Matching) -> Reply {
        let last = self.requests(of).pop();
        self.replay(&last.unwrap_or_else(|| panic!("no request was seen with {of:?}")))
            .await
    }

    /// Sends bytes to the server, on a connection of its own, and reads one answer.
    pub async fn replay(&self, request: &[u8]) -> Reply {
        let mut wire = Wire::connect(self.shared.target).await.unwrap();
        wire.send(request).await.unwrap();
        tokio::time::timeout(secs(20), wire.next())
            .await
            .unwrap()
            .unwrap()
    }

    fn listen(&self, on: bool) {
        let (done, wait) = sync_mpsc::channel();
        self.listening
            .send(Listening { on, done })
            .expect("the proxy's thread is gone");
        wait.recv().expect("the proxy's thread is gone");
    }
}

impl Injected {
    /// Waits until the fault has met its message: for a reply, the server has run the request.
    ///
    /// # Panics
    ///
    /// If that takes longer than ten seconds.
    pub async fn hit(&self) {
        let mut hit = self.mark.hit.subscribe();
        let waited = tokio::time::timeout(secs(10), hit.wait_for(|hit| *hit)).await;
        assert!(waited.is_ok(), "within 10 s nothing met {:?}", self.fault);
    }

    /// Whether the fault has met its message.
    pub fn is_hit(&self) -> bool {
        *self.mark.hit.borrow()
    }

    /// Lets a held message go on.
    pub fn release(&self) {
        self.mark.released.send_replace(true);
    }
}

// ---- what the connections share ----

struct Shared {
    target: u16,
    link: watch::Sender<Link>,
    state: Mutex<State>,
}

#[derive(Clone, Copy, Default)]
struct Link {
    requests: Direction,
    replies: Direction,
    times_healed: usize,
}

#[derive(Clone, Copy, Default)]
struct Direction {
    delay: Duration,
    hold: bool,
}

struct State {
    rules: Vec<Rule>,
    /// Marks of the messages that are held.
    holding: Vec<Arc<Mark>>,
    fates: Vec<watch::Sender<Fate>>,
    fate_of_new: Fate,
    seen: VecDeque<Arc<[u8]>>,
}

struct Rule {
    leg: Leg,
    of: Matching,
    left: usize,
    act: Act,
    mark: Arc<Mark>,
}

struct Mark {
    hit: watch::Sender<bool>,
    released: watch::Sender<bool>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Fate {
    Well,
    Silent,
    HalfOpen,
    Close,
    Reset,
}

impl From<Then> for Fate {
    fn from(then: Then) -> Self {
        match then {
            Then::Close => Self::Close,
            Then::Reset => Self::Reset,
            Then::Discard => Self::Silent,
        }
    }
}

impl Mark {
    fn new() -> Self {
        Self {
            hit: watch::Sender::new(false),
            released: watch::Sender::new(false),
        }
    }

    fn hit(&self) {
        self.hit.send_replace(true);
    }

    async fn released(&self) {
        let _ = self
            .released
            .subscribe()
            .wait_for(|released| *released)
            .await;
    }
}

impl Shared {
    fn new(target: u16) -> Self {
        let state = State {
            rules: Vec::new(),
            holding: Vec::new(),
            fates: Vec::new(),
            fate_of_new: Fate::Well,
            seen: VecDeque::new(),
        };
        Self {
            target,
            link: watch::Sender::new(Link::default()),
            state: Mutex::new(state),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What happens to this message: every rule that fits counts it, the first whose turn it is
    /// acts.
    fn judge(&self, leg: Leg, wire: &[u8]) -> Option<(Act, Arc<Mark>)> {
        let mut state = self.lock();
        let mut verdict = None;
        for rule in &mut state.rules {
            if rule.leg == leg && rule.left > 0 && rule.of.fits(wire) {
                rule.left -= 1;
                if rule.left == 0 && verdict.is_none() {
                    verdict = Some((rule.act, Arc::clone(&rule.mark)));
                }
            }
        }
        state.rules.retain(|rule| rule.left > 0);
        if let Some((act, mark)) = &verdict {
            if *act == Act::Hold {
                state.holding.push(Arc::clone(mark));
            }
            mark.hit();
        }
        verdict
    }
}

impl State {
    /// Decides what becomes of the connections there are, and of those to come.
    fn doom(&mut self, fate: Fate, also_new: bool) {
        for connection in self.fates.drain(..) {
            connection.send_replace(fate);
        }
        if also_new {
            self.fate_of_new = fate;
        }
    }

    fn forget_closed(&mut self) {
        self.fates.retain(|fate| !fate.is_closed());
    }

    fn record(&mut self, wire: &Arc<[u8]>) {
        if self.seen.len() == 10_000 {
            self.seen.pop_front();
        }
        self.seen.push_back(Arc::clone(wire));
    }
}

// ---- connections ----

fn listen_anywhere() -> (TcpListener, u16) {
    for _ in 0..20 {
        let port = free_port();
        if let Ok(listener) = listen_on(port) {
            return (listener, port);
        }
    }
    panic!("no port to listen on");
}

fn listen_on(port: u16) -> io::Result<TcpListener> {
    let socket = TcpSocket::new_v4()?;
    socket.set_reuseaddr(true)?;
    socket.bind(([127, 0, 0, 1], port).into())?;
    socket.listen(1024)
}

/// A process that is being started elsewhere in the test binary has a copy of the listening socket
/// for a moment, between its fork and its exec.
async fn until_refused(port: u16) {
    while TcpStream::connect(("127.0.0.1", port)).await.is_ok() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// Runs until the [`Proxy`] is dropped; its connections end with the runtime.
async fn accept_all(
    shared: Arc<Shared>,
    first: TcpListener,
    port: u16,
    mut orders: mpsc::UnboundedReceiver<Listening>,
) {
    let mut listener = Some(first);
    loop {
        let accept = async {
            match &listener {
                Some(listener) => listener.accept().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            order = orders.recv() => {
                let Some(Listening { on, done }) = order else { return };
                if !on {
                    listener = None;
                    until_refused(port).await;
                } else if listener.is_none() {
                    listener = Some(listen_on(port).expect("the proxy's port was taken"));
                }
                let _ = done.send(());
            }
            accepted = accept => {
                let Ok((client, _)) = accepted else { continue };
                let fate = {
                    let mut state = shared.lock();
                    let fate = watch::Sender::new(state.fate_of_new);
                    let receiver = fate.subscribe();
                    state.forget_closed();
                    if state.fate_of_new == Fate::Well {
                        state.fates.push(fate);
                    }
                    receiver
                };
                tokio::spawn(connection(Arc::clone(&shared), client, fate));
            }
        }
    }
}

async fn connection(shared: Arc<Shared>, mut client: TcpStream, mut fate: watch::Receiver<Fate>) {
    drop(client.set_nodelay(true));
    let mut server = None;
    let mut end = *fate.borrow_and_update();
    if end == Fate::Well {
        let Ok(mut upstream) = TcpStream::connect(("127.0.0.1", shared.target)).await else {
            drop(client.set_zero_linger());
            return;
        };
        drop(upstream.set_nodelay(true));
        end = tokio::select! {
            biased;
            // The sender goes when the proxy dooms the connection, after it has sent.
            doomed = fate.wait_for(|fate| *fate != Fate::Well) => {
                doomed.map_or(Fate::Reset, |fate| *fate)
            }
            end = forward(&shared, &mut client, &mut upstream) => end,
        };
        server = Some(upstream);
    }
    match end {
        Fate::Well => {}
        Fate::Silent => {
            let kept = async {
                if let Some(server) = &mut server {
                    discard(server).await;
                }
                std::future::pending::<()>().await;
            };
            tokio::select! {
                () = kept => {}
                () = discard(&mut client) => {}
            }
        }
        Fate::HalfOpen => {
            drop(server);
            discard(&mut client).await;
        }
        Fate::Close => {
            drop(server);
            drop(client.shutdown().await);
            // A socket that is closed with unread bytes sends RST.
            drop(tokio::time::timeout(secs(1), discard(&mut client)).await);
        }
        Fate::Reset => {
            if let Some(server) = &server {
                drop(server.set_zero_linger());
            }
            drop(client.set_zero_linger());
        }
    }
}

async fn discard(stream: &mut TcpStream) {
    let mut chunk = [0; 4096];
    while stream.read(&mut chunk).await.is_ok_and(|len| len > 0) {}
}

/// A message on its way.
struct Item {
    due: Instant,
    /// Times the link was healed when it came; once more, and it is due.
    healed: usize,
    gate: Option<Arc<Mark>>,
    what: What,
}

enum What {
    Frame(Arc<[u8]>),
    /// Here something was swallowed.
    Gap(Then),
}

type Queue = mpsc::UnboundedSender<Item>;

/// A request whose answer has not come.
struct Pending {
    request: Arc<[u8]>,
    /// Confirmations still to come, for a (un)subscription.
    confirmations: usize,
}

/// What a connection asked for.
#[derive(Default)]
struct Asked {
    pending: VecDeque<Pending>,
    /// Lists that look like messages are messages.
    subscribed: bool,
}

/// Forwards until the server or a fault ends the connection. A client that closes ends only its
/// own direction, when all it sent has arrived.
async fn forward(shared: &Shared, client: &mut TcpStream, server: &mut TcpStream) -> Fate {
    let (from_client, to_client) = client.split();
    let (from_server, to_server) = server.split();
    let (requests, requests_out) = mpsc::unbounded_channel();
    let (replies, replies_out) = mpsc::unbounded_channel();
    let asked = Mutex::new(Asked::default());
    let up = async {
        let read = read_requests(shared, from_client, &asked, requests);
        let write = write_all(shared, |link| link.requests, requests_out, to_server);
        match pump(read, write).await {
            Fate::Well => std::future::pending().await,
            end => end,
        }
    };
    let down = pump(
        read_replies(shared, from_server, &asked, replies),
        write_all(shared, |link| link.replies, replies_out, to_client),
    );
    tokio::select! {
        end = up => end,
        end = down => end,
    }
}

/// Runs one direction until all that was read is written, or a fault ends it.
async fn pump(read: impl Future<Output = ()>, write: impl Future<Output = Fate>) -> Fate {
    let mut write = pin!(write);
    tokio::select! {
        biased;
        end = &mut write => end,
        () = read => write.await,
    }
}

async fn read_requests(
    shared: &Shared,
    mut from: ReadHalf<'_>,
    asked: &Mutex<Asked>,
    queue: Queue,
) {
    let mut unread = Vec::new();
    loop {
        let mut at = 0;
        while let Some((request, len)) = first_request(&unread[at..]) {
            let wire: Arc<[u8]> = unread[at..at + len].into();
            at += len;
            shared.lock().record(&wire);
            // Before the verdict: if the link heals in between, the fault is over, not missed.
            let link = *shared.link.borrow();
            let verdict = shared.judge(Leg::Request, &wire);
            let swallowed = matches!(verdict, Some((Act::Swallow(_), _)));
            if !swallowed {
                let confirmations = request.map_or(0, |request| confirmations(&request));
                let pending = Pending {
                    request: Arc::clone(&wire),
                    confirmations,
                };
                asked.lock().unwrap().pending.push_back(pending);
            }
            let item = item(&link, |link| link.requests, wire, verdict);
            if queue.send(item).is_err() {
                return;
            }
        }
        unread.drain(..at);
        if !from.read_buf(&mut unread).await.is_ok_and(|len| len > 0) {
            return;
        }
    }
}

async fn read_replies(shared: &Shared, mut from: ReadHalf<'_>, asked: &Mutex<Asked>, queue: Queue) {
    let mut unread = Vec::new();
    loop {
        let mut at = 0;
        loop {
            let (reply, len) = match resp::parse(&unread[at..]) {
                Ok(Some(parsed)) => parsed,
                Ok(None) => break,
                Err(error) => {
                    eprintln!("fault proxy: from the server: {error}");
                    return;
                }
            };
            let wire: Arc<[u8]> = unread[at..at + len].into();
            at += len;
            let link = *shared.link.borrow();
            let request = asked.lock().unwrap().answered(&reply);
            let verdict = match request {
                Some(request) => shared.judge(Leg::Reply, &request),
                None => shared.judge(Leg::Message, &wire),
            };
            let item = item(&link, |link| link.replies, wire, verdict);
            if queue.send(item).is_err() {
                return;
            }
        }
        unread.drain(..at);
        if !from.read_buf(&mut unread).await.is_ok_and(|len| len > 0) {
            return;
        }
    }
}

fn item(
    link: &Link,
    direction: impl Fn(&Link) -> Direction,
    wire: Arc<[u8]>,
    verdict: Option<(Act, Arc<Mark>)>,
) -> Item {
    let due = Instant::now() + direction(link).delay;
    let healed = link.times_healed;
    let item = Item {
        due,
        healed,
        gate: None,
        what: What::Frame(wire),
    };
    match verdict {
        None => item,
        Some((Act::Hold, mark)) => Item {
            gate: Some(mark),
            ..item
        },
        Some((Act::Delay(by), _)) => Item {
            due: due + by,
            ..item
        },
        Some((Act::Swallow(then), _)) => Item {
            what: What::Gap(then),
            ..item
        },
    }
}

/// Writes what is in the queue, each when its time has come. `Well` when all is written.
async fn write_all(
    shared: &Shared,
    direction: impl Fn(&Link) -> Direction,
    mut queue: mpsc::UnboundedReceiver<Item>,
    mut to: WriteHalf<'_>,
) -> Fate {
    let mut link = shared.link.subscribe();
    let mut lost = false;
    while let Some(item) = queue.recv().await {
        if item.due > Instant::now() {
            tokio::select! {
                () = tokio::time::sleep_until(item.due) => {}
                _ = link.wait_for(|link| link.times_healed != item.healed) => {}
            }
        }
        if let Some(mark) = item.gate {
            mark.released().await;
        }
        drop(link.wait_for(|link| !direction(link).hold).await);
        match item.what {
            What::Frame(_) if lost => {}
            // Whoever does not listen any more still answers for what came before.
            What::Frame(wire) => lost = to.write_all(&wire).await.is_err(),
            What::Gap(Then::Discard) => lost = true,
            What::Gap(then) => return then.into(),
        }
    }
    drop(to.shutdown().await);
    Fate::Well
}

/// The first whole request and its length; it may be an inline one or, from a stranger, anything.
fn first_request(unread: &[u8]) -> Option<(Option<Reply>, usize)> {
    if *unread.first()? != b'*' {
        return Some((None, unread.iter().position(|&byte| byte == b'\n')? + 1));
    }
    match resp::parse(unread) {
        Ok(parsed) => parsed.map(|(request, len)| (Some(request), len)),
        Err(_) => Some((None, unread.len())),
    }
}

/// How many confirmations a request brings: one for each channel of a (un)subscription.
fn confirmations(request: &Reply) -> usize {
    let Reply::List(args) = request else { return 0 };
    if is_subscription(request.head()) {
        (args.len() - 1).max(1)
    } else {
        0
    }
}

fn is_subscription(word: Option<&[u8]>) -> bool {
    let word = word.unwrap_or_default().to_ascii_lowercase();
    matches!(
        word.as_slice(),
        b"subscribe"
            | b"psubscribe"
            | b"ssubscribe"
            | b"unsubscribe"
            | b"punsubscribe"
            | b"sunsubscribe"
    )
}

impl Asked {
    /// The request that this is an answer to; `None` for what comes unasked.
    fn answered(&mut self, reply: &Reply) -> Option<Arc<[u8]>> {
        let first = self.pending.front_mut()?;
        let push = matches!(reply, Reply::Push(_));
        if push || self.subscribed || first.confirmations > 0 {
            let word = reply.head();
            if is_subscription(word) {
                self.subscribed = true;
                // More than were asked for: an unsubscription from everything, or by the server.
                if first.confirmations == 0 {
                    return None;
                }
                first.confirmations -= 1;
                if first.confirmations > 0 {
                    return Some(Arc::clone(&first.request));
                }
            } else if push || matches!(word, Some(b"message" | b"pmessage" | b"smessage")) {
                return None;
            }
        }
        self.pending.pop_front().map(|pending| pending.request)
    }
}

fn contains(wire: &[u8], part: &[u8]) -> bool {
    part.is_empty() || wire.windows(part.len()).any(|window| window == part)
}

/// The first word of a request.
fn command_of(wire: &[u8]) -> &[u8] {
    let mut lines = wire.split(|&byte| byte == b'\n');
    let word = if wire.starts_with(b"*") {
        lines.nth(2)
    } else {
        lines.next()
    };
    word.unwrap_or_default()
        .split(u8::is_ascii_whitespace)
        .next()
        .unwrap_or_default()
}
