package interop;

import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.lang.reflect.InvocationTargetException;
import java.lang.reflect.Method;
import java.lang.reflect.Proxy;
import java.net.URLDecoder;
import java.nio.charset.StandardCharsets;
import java.util.Arrays;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.BlockingQueue;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.LinkedBlockingQueue;
import java.util.concurrent.TimeUnit;
import org.redisson.Redisson;
import org.redisson.api.RBucket;
import org.redisson.api.RFencedLock;
import org.redisson.api.RLock;
import org.redisson.api.RScript;
import org.redisson.api.RedissonClient;
import org.redisson.client.codec.StringCodec;
import org.redisson.config.Config;
import org.redisson.config.SingleServerConfig;

/**
 * Redisson under the orders of a test: a command a line on stdin, an answer a line on stdout.
 *
 * <p>A command is
 *
 * <pre>
 * NUMBER THREAD VERB ARGUMENT..
 * </pre>
 *
 * and its answer, whenever it comes, begins with its number:
 *
 * <pre>
 * NUMBER ok                      done, or true
 * NUMBER false                   false, or null
 * NUMBER VALUE                   a number or an owner id
 * NUMBER error CLASS MESSAGE     it threw
 * </pre>
 *
 * THREAD names the Java thread on which the command runs: Redisson owns by thread. Commands of one
 * thread run one after the other, those of different threads at once. Arguments, and the message of
 * an error, are percent-encoded, so that every name is one word.
 *
 * <pre>
 * client CLIENT KEY=VALUE..      makes a client: url, watchdog (ms), prefix (of a NameMapper),
 *                                fairwait (ms; fairLockWaitTimeout)
 * close CLIENT                   shuts it down
 * id CLIENT                      the owner id of this thread: UUID:THREADID
 * interrupt                      interrupts the thread, at once
 *
 * lock CLIENT KIND NAME          lock()
 * lock CLIENT KIND NAME MS       lock(lease)
 * try CLIENT KIND NAME           tryLock()
 * trywait CLIENT KIND NAME WAIT LEASE     tryLock(wait, lease) in ms; lease -1: renewed
 * unlock CLIENT KIND NAME        unlock()
 * force CLIENT KIND NAME         forceUnlock()
 * count CLIENT KIND NAME         getHoldCount(), of this thread
 * locked CLIENT KIND NAME        isLocked()
 * ttl CLIENT KIND NAME           remainTimeToLive()
 *
 * locktoken CLIENT fenced NAME              lockAndGetToken()
 * trytoken CLIENT fenced NAME WAIT LEASE    tryLockAndGetToken(wait, lease) in ms
 * token CLIENT fenced NAME                  getToken()
 *
 * counter CLIENT KIND NAME COUNTER N    N times: lock, GET the counter, SET one more, unlock
 * register CLIENT fenced NAME KEY ENTER WRITE WHO MS
 *                                for ever: lockAndGetToken, read the register KEY by the one script
 *                                (token, WHO), think for so long, write it by the other (token, WHO,
 *                                value), unlock
 * </pre>
 *
 * KIND is plain, fair, fenced, spin, read, write, nonreentrant or nonreentrantfair (Redisson 4.4.0 and
 * newer), or multi: then NAME is several names with commas between, each encoded for itself. A lock
 * object is kept for each thread. When stdin ends the process halts: nothing is released.
 */
public final class Driver {
  private static final PrintStream OUT = System.out;
  private static final Map<String, RedissonClient> CLIENTS = new ConcurrentHashMap<>();

  public static void main(String[] args) throws Exception {
    // What libraries print is no answer.
    System.setOut(System.err);
    BufferedReader in =
        new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
    Map<String, Worker> workers = new HashMap<>();
    for (String line = in.readLine(); line != null; line = in.readLine()) {
      String[] words = line.split(" ");
      Worker worker = workers.computeIfAbsent(words[1], Worker::start);
      if (words[2].equals("interrupt")) {
        worker.thread.interrupt();
        answer(words[0], "ok");
      } else {
        worker.commands.add(words);
      }
    }
    Runtime.getRuntime().halt(0);
  }

  private static void answer(String number, String text) {
    // One call, so that answers of several threads do not mix.
    byte[] line = (number + ' ' + text + '\n').getBytes(StandardCharsets.UTF_8);
    synchronized (OUT) {
      OUT.write(line, 0, line.length);
      OUT.flush();
    }
  }

  /** One thread, as an owner of locks. */
  private static final class Worker implements Runnable {
    final BlockingQueue<String[]> commands = new LinkedBlockingQueue<>();
    final Map<String, RLock> locks = new HashMap<>();
    Thread thread;

    static Worker start(String name) {
      Worker worker = new Worker();
      worker.thread = new Thread(worker, name);
      worker.thread.setDaemon(true);
      worker.thread.start();
      return worker;
    }

    @Override
    public void run() {
      while (true) {
        String[] words;
        try {
          words = commands.take();
        } catch (InterruptedException late) {
          continue; // It was for a command that had ended by itself.
        }
        String text;
        try {
          text = text(run(words));
        } catch (Throwable thrown) {
          text = "error " + thrown.getClass().getSimpleName() + ' ' + encode("" + thrown.getMessage());
        }
        answer(words[0], text);
      }
    }

    private static String text(Object result) {
      if (result == null || result.equals(true)) {
        return "ok";
      }
      return result.toString();
    }

    private Object run(String[] words) throws Exception {
      String verb = words[2];
      String client = words[3];
      switch (verb) {
        case "client":
          CLIENTS.put(client, Redisson.create(config(Arrays.copyOfRange(words, 4, words.length))));
          return null;
        case "close":
          CLIENTS.remove(client).shutdown();
          return null;
        case "id":
          return CLIENTS.get(client).getId() + ':' + Thread.currentThread().getId();
        default:
          return run(verb, client, lock(client, words[4], words[5]), words);
      }
    }

    private Object run(String verb, String client, RLock lock, String[] words) throws Exception {
      switch (verb) {
        case "lock":
          if (words.length > 6) {
            lock.lock(Long.parseLong(words[6]), TimeUnit.MILLISECONDS);
          } else {
            lock.lock();
          }
          return null;
        case "try":
          return lock.tryLock();
        case "trywait":
          return lock.tryLock(
              Long.parseLong(words[6]), Long.parseLong(words[7]), TimeUnit.MILLISECONDS);
        case "unlock":
          lock.unlock();
          return null;
        case "force":
          return lock.forceUnlock();
        case "count":
          return lock.getHoldCount();
        case "locked":
          return lock.isLocked();
        case "ttl":
          return lock.remainTimeToLive();
        case "locktoken":
          return ((RFencedLock) lock).lockAndGetToken();
        case "trytoken":
          Long token =
              ((RFencedLock) lock)
                  .tryLockAndGetToken(
                      Long.parseLong(words[6]), Long.parseLong(words[7]), TimeUnit.MILLISECONDS);
          return token == null ? false : token;
        case "token":
          return ((RFencedLock) lock).getToken();
        case "counter":
          return count(CLIENTS.get(client), lock, decode(words[6]), Long.parseLong(words[7]));
        case "register":
          return write(CLIENTS.get(client), (RFencedLock) lock, words);
        default:
          throw new IllegalArgumentException(verb);
      }
    }

    private RLock lock(String client, String kind, String name) {
      return locks.computeIfAbsent(
          client + ' ' + kind + ' ' + name, key -> newLock(CLIENTS.get(client), kind, name));
    }
  }

  /** Reads and writes as two commands: what two at once would spoil. */
  private static Object count(RedissonClient client, RLock lock, String counter, long n) {
    RBucket<String> bucket = client.getBucket(counter, StringCodec.INSTANCE);
    for (long i = 0; i < n; i++) {
      lock.lock();
      try {
        String before = bucket.get();
        bucket.set(Long.toString(before == null ? 1 : Long.parseLong(before) + 1));
      } finally {
        lock.unlock();
      }
    }
    return n;
  }

  private static Object write(RedissonClient client, RFencedLock lock, String[] words)
      throws InterruptedException {
    List<Object> key = List.of(decode(words[6]));
    String enter = decode(words[7]);
    String write = decode(words[8]);
    Object who = decode(words[9]);
    long pause = Long.parseLong(words[10]);
    RScript.Mode mode = RScript.Mode.READ_WRITE;
    RScript.ReturnType text = RScript.ReturnType.VALUE;
    RScript script = client.getScript(StringCodec.INSTANCE);
    while (true) {
      Object token = lock.lockAndGetToken().toString();
      String before = script.eval(mode, enter, text, key, token, who);
      Thread.sleep(pause);
      if (!before.equals("refused")) {
        Object after = Long.toString(Long.parseLong(before) + 1);
        script.eval(mode, write, text, key, token, who, after);
      }
      try {
        lock.unlock();
      } catch (IllegalMonitorStateException lost) {
        // The only way in which Redisson tells its holder. The fence has seen to it.
      }
    }
  }

  private static RLock newLock(RedissonClient client, String kind, String name) {
    switch (kind) {
      case "plain":
        return client.getLock(decode(name));
      case "fair":
        return client.getFairLock(decode(name));
      case "fenced":
        return client.getFencedLock(decode(name));
      case "spin":
        return client.getSpinLock(decode(name));
      case "read":
        return client.getReadWriteLock(decode(name)).readLock();
      case "write":
        return client.getReadWriteLock(decode(name)).writeLock();
      case "nonreentrant":
        return byReflection(client, "getNonReentrantLock", decode(name));
      case "nonreentrantfair":
        return byReflection(client, "getNonReentrantFairLock", decode(name));
      case "multi":
        return client.getMultiLock(
            Arrays.stream(name.split(","))
                .map(member -> client.getLock(decode(member)))
                .toArray(RLock[]::new));
      default:
        throw new IllegalArgumentException(kind);
    }
  }

  /** What not every version has. */
  private static RLock byReflection(RedissonClient client, String method, String name) {
    try {
      return (RLock) RedissonClient.class.getMethod(method, String.class).invoke(client, name);
    } catch (NoSuchMethodException missing) {
      throw new UnsupportedOperationException(method);
    } catch (IllegalAccessException | InvocationTargetException trouble) {
      throw new IllegalStateException(trouble);
    }
  }

  private static Config config(String[] settings) throws Exception {
    Config config = new Config();
    // A server of a test has few of us before it, and both languages share few cores.
    config.setThreads(8).setNettyThreads(4);
    SingleServerConfig server =
        config
            .useSingleServer()
            .setConnectionMinimumIdleSize(2)
            .setConnectionPoolSize(16)
            .setSubscriptionConnectionMinimumIdleSize(1);
    for (String setting : settings) {
      int equals = setting.indexOf('=');
      String value = decode(setting.substring(equals + 1));
      switch (setting.substring(0, equals)) {
        case "url":
          server.setAddress(value);
          break;
        case "watchdog":
          config.setLockWatchdogTimeout(Long.parseLong(value));
          break;
        case "fairwait":
          Config.class
              .getMethod("setFairLockWaitTimeout", long.class)
              .invoke(config, Long.parseLong(value));
          break;
        case "prefix":
          mapNames(server, value);
          break;
        default:
          throw new IllegalArgumentException(setting);
      }
    }
    return config;
  }

  /** The interface lies in another package since 4.0. */
  private static void mapNames(SingleServerConfig server, String prefix) throws Exception {
    for (Method method : SingleServerConfig.class.getMethods()) {
      if (!method.getName().equals("setNameMapper")
          || !method.getParameterTypes()[0].getSimpleName().equals("NameMapper")) {
        continue;
      }
      Object mapper =
          Proxy.newProxyInstance(
              Driver.class.getClassLoader(),
              new Class<?>[] {method.getParameterTypes()[0]},
              (proxy, called, arguments) -> {
                switch (called.getName()) {
                  case "map":
                    return prefix + arguments[0];
                  case "unmap":
                    return ((String) arguments[0]).substring(prefix.length());
                  default:
                    return called.getName();
                }
              });
      method.invoke(server, mapper);
      return;
    }
    throw new UnsupportedOperationException("setNameMapper");
  }

  private static String decode(String text) {
    return URLDecoder.decode(text, StandardCharsets.UTF_8);
  }

  private static String encode(String text) {
    return java.net.URLEncoder.encode(text, StandardCharsets.UTF_8).replace("+", "%20");
  }
}
