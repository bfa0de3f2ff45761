package peers;

import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.time.Instant;
import java.util.ArrayList;
import java.util.List;
import java.util.Locale;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.concurrent.atomic.AtomicLong;
import org.redisson.Redisson;
import org.redisson.api.RLock;
import org.redisson.api.RReadWriteLock;
import org.redisson.api.RedissonClient;
import org.redisson.config.Config;

/**
 * Redisson's lock, with its watchdog, under the work of the Rust project beside this one.
 *
 * <pre>
 * peers redisson[-fair|-read|-write|-multi] pair|contended|mix --url URL --tasks N --seconds S
 *                                                                  prints one line of JSON
 * peers redisson worker --url URL --tasks N --name NAME            see processes.rs
 * </pre>
 */
public final class Peers {
  private static String option(String[] args, String key, String otherwise) {
    for (int i = 0; i + 1 < args.length; i++) {
      if (args[i].equals("--" + key)) {
        return args[i + 1];
      }
    }
    return otherwise;
  }

  private static double percentile(double[] sorted, double share) {
    return sorted.length == 0
        ? Double.NaN
        : sorted[Math.min((int) (sorted.length * share), sorted.length - 1)];
  }

  private static long nowMicros() {
    Instant now = Instant.now();
    return now.getEpochSecond() * 1_000_000 + now.getNano() / 1000;
  }

  public static void main(String[] args) throws Exception {
    String scenario = args[1];
    int tasks = Integer.parseInt(option(args, "tasks", "1"));
    double seconds = Double.parseDouble(option(args, "seconds", "2"));
    String name = option(args, "name", "bench:redisson:" + ProcessHandle.current().pid());
    Config config = new Config();
    config
        .useSingleServer()
        .setAddress(option(args, "url", "redis://127.0.0.1:6379"));
    RedissonClient client = Redisson.create(config);
    if (scenario.equals("worker")) {
      worker(client, name, tasks);
    } else {
      measured(client, args[0], scenario, name, tasks, seconds);
    }
    // Threads that still wait would hold up the end.
    Runtime.getRuntime().halt(0);
  }

  private static void worker(RedissonClient client, String name, int tasks) throws Exception {
    // The classes are loaded and compiled before the work begins.
    RLock warm = client.getLock(name + ":warm:" + ProcessHandle.current().pid());
    for (int i = 0; i < 500; i++) {
      warm.lock();
      warm.unlock();
    }
    System.out.println("ready");
    System.out.flush();
    String[] moments = new BufferedReader(new InputStreamReader(System.in)).readLine().split(" ");
    long start = Long.parseLong(moments[0]);
    long end = Long.parseLong(moments[1]);
    Thread.sleep(Math.max(0, (start - nowMicros()) / 1000));
    List<StringBuilder> had = new ArrayList<>();
    List<Thread> threads = new ArrayList<>();
    for (int i = 0; i < tasks; i++) {
      int task = i;
      StringBuilder mine = new StringBuilder();
      had.add(mine);
      Thread thread =
          new Thread(
              () -> {
                RLock lock = client.getLock(name);
                while (nowMicros() < end) {
                  lock.lock();
                  long acquired = nowMicros();
                  synchronized (mine) {
                    mine.append(task).append(' ').append(acquired).append(' ');
                    mine.append(nowMicros()).append('\n');
                  }
                  lock.unlock();
                }
              });
      thread.setDaemon(true);
      // A contender that fails would only make it easier for the others.
      thread.setUncaughtExceptionHandler(
          (failed, problem) -> {
            problem.printStackTrace();
            Runtime.getRuntime().halt(1);
          });
      thread.start();
      threads.add(thread);
    }
    long last = end + 300_000;
    for (Thread thread : threads) {
      thread.join(Math.max(1, (last - nowMicros()) / 1000));
    }
    for (StringBuilder mine : had) {
      synchronized (mine) {
        System.out.print(mine);
      }
    }
    ProcessHandle.current()
        .info()
        .totalCpuDuration()
        .ifPresent(cpu -> System.out.println("cpu " + cpu.toNanos() / 1000));
    System.out.flush();
  }

  private static final class Contender {
    final List<Double> waits = new ArrayList<>(); // microseconds
    final List<Double> pairs = new ArrayList<>();
    final List<Double> reads = new ArrayList<>();
    final List<Double> writes = new ArrayList<>();
    long since;
    boolean writing;
  }

  private static RLock lock(
      RedissonClient client, String library, String scenario, String name, boolean writes) {
    if (scenario.equals("mix")) {
      RReadWriteLock both = client.getReadWriteLock(name);
      return writes ? both.writeLock() : both.readLock();
    }
    switch (library) {
      case "redisson-fair":
        return client.getFairLock(name);
      case "redisson-read":
        return client.getReadWriteLock(name).readLock();
      case "redisson-write":
        return client.getReadWriteLock(name).writeLock();
      case "redisson-multi":
        return client.getMultiLock(
            client.getLock(name + ":a"), client.getLock(name + ":b"), client.getLock(name + ":c"));
      default:
        return client.getLock(name);
    }
  }

  private static double[] sorted(List<Double> values) {
    return values.stream().mapToDouble(Double::doubleValue).sorted().toArray();
  }

  private static void measured(
      RedissonClient client, String library, String scenario, String name, int tasks, double seconds)
      throws Exception {
    // Longer than elsewhere: the compiler of the virtual machine needs it.
    long begin = System.nanoTime() + 2_000_000_000L;
    long end = begin + (long) (seconds * 1e9);
    AtomicInteger last = new AtomicInteger(-1);
    AtomicLong handOffs = new AtomicLong();
    List<Contender> contenders = new ArrayList<>();
    List<Thread> threads = new ArrayList<>();
    for (int i = 0; i < tasks; i++) {
      int task = i;
      Contender mine = new Contender();
      contenders.add(mine);
      Thread thread =
          new Thread(
              () -> {
                int turn = task;
                String wanted = scenario.equals("own-names") ? name + ":" + task : name;
                while (System.nanoTime() < end) {
                  boolean writes = ++turn % 10 == 0;
                  RLock lock = lock(client, library, scenario, wanted, writes);
                  long start = System.nanoTime();
                  synchronized (mine) {
                    mine.since = start;
                    mine.writing = writes;
                  }
                  lock.lock();
                  long got = System.nanoTime();
                  boolean other = last.getAndSet(task) != task;
                  lock.unlock();
                  synchronized (mine) {
                    mine.since = 0;
                    if (got >= begin && got < end) {
                      (writes ? mine.writes : mine.reads).add((got - start) / 1e3);
                      mine.waits.add((got - start) / 1e3);
                      mine.pairs.add((System.nanoTime() - start) / 1e3);
                      if (other) {
                        handOffs.incrementAndGet();
                      }
                    }
                  }
                }
              });
      thread.setDaemon(true);
      thread.start();
      threads.add(thread);
    }
    Thread.sleep((end - System.nanoTime()) / 1_000_000 + 100);
    List<Double> allWaits = new ArrayList<>();
    List<Double> allPairs = new ArrayList<>();
    List<Double> allReads = new ArrayList<>();
    List<Double> allWrites = new ArrayList<>();
    List<Double> readsCutOff = new ArrayList<>();
    List<Double> writesCutOff = new ArrayList<>();
    int most = 0;
    int least = Integer.MAX_VALUE;
    int starved = 0;
    for (Contender mine : contenders) {
      synchronized (mine) {
        int served = mine.waits.size();
        most = Math.max(most, served);
        least = Math.min(least, served);
        starved += served == 0 ? 1 : 0;
        allWaits.addAll(mine.waits);
        allPairs.addAll(mine.pairs);
        allReads.addAll(mine.reads);
        allWrites.addAll(mine.writes);
        if (mine.since != 0 && mine.since < end) {
          double cutOff = (end - Math.max(mine.since, begin)) / 1e3;
          allWaits.add(cutOff);
          (mine.writing ? writesCutOff : readsCutOff).add(cutOff);
        }
      }
    }
    double[] waits = sorted(allWaits);
    double[] pairs = sorted(allPairs);
    String head =
        String.format(
            Locale.ROOT,
            "{\"library\":\"%s\",\"scenario\":\"%s\",\"tasks\":%d,\"seconds\":%.1f,",
            library,
            scenario,
            tasks,
            seconds);
    String rest =
        scenario.equals("pair") || scenario.equals("own-names")
            ? String.format(
                Locale.ROOT,
                "\"pairs_per_s\":%.1f,\"p50_us\":%.2f,\"p99_us\":%.2f}",
                pairs.length / seconds,
                percentile(pairs, 0.5),
                percentile(pairs, 0.99))
            : String.format(
                Locale.ROOT,
                "\"hand_offs_per_s\":%.1f,\"wait_p50_ms\":%.3f,\"wait_p99_ms\":%.3f,"
                    + "\"most_served\":%d,\"least_served\":%d,\"starved\":%d}",
                handOffs.get() / seconds,
                percentile(waits, 0.5) / 1e3,
                percentile(waits, 0.99) / 1e3,
                most,
                least,
                starved);
    if (scenario.equals("mix")) {
      double writesPerSecond = allWrites.size() / seconds;
      allReads.addAll(readsCutOff);
      allWrites.addAll(writesCutOff);
      rest =
          String.format(
              Locale.ROOT,
              "\"turns_per_s\":%.1f,\"writes_per_s\":%.1f,\"read_p99_ms\":%.3f,\"write_p99_ms\":%.3f}",
              pairs.length / seconds,
              writesPerSecond,
              percentile(sorted(allReads), 0.99) / 1e3,
              percentile(sorted(allWrites), 0.99) / 1e3);
    }
    System.out.println(head + rest);
    System.out.flush();
  }
}
