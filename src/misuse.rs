//! What must not compile, each beside a twin, one line away, that does.

/// A guard is released once: `release` takes it.
///
/// ```compile_fail,E0382
/// async fn leave(guard: leasehold::LockGuard) {
///     let _ = guard.release().await;
///     let _ = guard.release().await;
/// }
/// ```
///
/// ```
/// async fn leave(guard: leasehold::LockGuard) {
///     let _ = guard.release().await;
/// }
/// ```
mod a_guard_is_released_once {}

/// A guard that was released says nothing any more.
///
/// ```compile_fail,E0382
/// async fn leave(guard: leasehold::LockGuard) -> bool {
///     let _ = guard.release().await;
///     guard.is_held()
/// }
/// ```
///
/// ```
/// async fn leave(guard: leasehold::LockGuard) -> bool {
///     let held = guard.is_held();
///     let _ = guard.release().await;
///     held
/// }
/// ```
mod a_released_guard_is_gone {}

/// One `Lock` has one acquisition under way.
///
/// ```compile_fail,E0499
/// async fn both(first: &mut leasehold::Lock, second: &mut leasehold::Lock) {
///     drop(tokio::join!(first.acquire(), first.acquire()));
/// }
/// ```
///
/// ```
/// async fn both(first: &mut leasehold::Lock, second: &mut leasehold::Lock) {
///     drop(tokio::join!(first.acquire(), second.acquire()));
/// }
/// ```
mod a_lock_is_acquired_by_one_at_a_time {}

/// One context is in one branch of a `join!`: the other says `share()` or `fork()`.
///
/// ```compile_fail,E0499
/// async fn charge(ctx: &mut leasehold::LockContext) {
///     drop(ctx.lock("order:10").acquire().await);
/// }
/// async fn both(mut ctx: leasehold::LockContext) {
///     let mut other = ctx.share();
///     tokio::join!(charge(&mut ctx), charge(&mut ctx));
/// }
/// ```
///
/// ```
/// async fn charge(ctx: &mut leasehold::LockContext) {
///     drop(ctx.lock("order:10").acquire().await);
/// }
/// async fn both(mut ctx: leasehold::LockContext) {
///     let mut other = ctx.share();
///     tokio::join!(charge(&mut ctx), charge(&mut other));
/// }
/// ```
mod a_context_is_in_one_branch {}

/// The same with the branches written out.
///
/// ```compile_fail,E0499
/// async fn both(mut ctx: leasehold::LockContext) {
///     let mut other = ctx.fork();
///     drop(tokio::join!(
///         async { ctx.lock("order:10").acquire().await },
///         async { ctx.lock("order:10").acquire().await },
///     ));
/// }
/// ```
///
/// ```
/// async fn both(mut ctx: leasehold::LockContext) {
///     let mut other = ctx.fork();
///     drop(tokio::join!(
///         async { ctx.lock("order:10").acquire().await },
///         async { other.lock("order:10").acquire().await },
///     ));
/// }
/// ```
mod a_context_is_in_one_async_block {}

/// A copy of a context could mean two things, so there is none.
///
/// ```compile_fail,E0599
/// fn another(ctx: leasehold::LockContext) -> leasehold::LockContext {
///     ctx.clone()
/// }
/// ```
///
/// ```
/// fn another(ctx: leasehold::LockContext) -> leasehold::LockContext {
///     ctx.share()
/// }
/// ```
mod a_context_is_not_cloned {}

/// Nor is a guard: its level would be left twice.
///
/// ```compile_fail,E0599
/// fn another(guard: leasehold::LockGuard) -> leasehold::LockGuard {
///     guard.clone()
/// }
/// ```
///
/// ```
/// fn another(guard: leasehold::LockGuard) -> leasehold::LockContext {
///     guard.context()
/// }
/// ```
mod a_guard_is_not_cloned {}
