// redsync under the work of ../rust/src/scenarios.rs; prints one line of JSON.
//
//	peers redsync pair|own-names|contended --url URL --tasks N --seconds S
package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-redsync/redsync/v4"
	"github.com/go-redsync/redsync/v4/redis/goredis/v9"
	"github.com/redis/go-redis/v9"
)

func percentile(sorted []float64, share float64) float64 {
	if len(sorted) == 0 {
		return 0
	}
	return sorted[min(int(float64(len(sorted))*share), len(sorted)-1)]
}

type contender struct {
	sync.Mutex
	waits, pairs []float64 // microseconds
	since        time.Time
}

func main() {
	if len(os.Args) < 3 {
		fmt.Fprintln(os.Stderr, "peers redsync pair|contended --url URL [--tasks N] [--seconds S]")
		os.Exit(2)
	}
	scenario := os.Args[2]
	flags := flag.NewFlagSet("peers", flag.ExitOnError)
	url := flags.String("url", "redis://127.0.0.1:6379", "")
	tasks := flags.Int("tasks", 1, "")
	seconds := flags.Float64("seconds", 2, "")
	_ = flags.Parse(os.Args[3:])

	options, err := redis.ParseURL(*url)
	if err != nil {
		panic(err)
	}
	locks := redsync.New(goredis.NewPool(redis.NewClient(options)))
	name := fmt.Sprintf("bench:redsync:%d", os.Getpid())
	begin := time.Now().Add(400 * time.Millisecond)
	end := begin.Add(time.Duration(*seconds * float64(time.Second)))
	var last, handOffs atomic.Int64
	last.Store(-1)
	contenders := make([]contender, *tasks)
	for task := range *tasks {
		go func() {
			mine := &contenders[task]
			wanted := name
			if scenario == "own-names" {
				wanted = fmt.Sprintf("%s:%d", name, task)
			}
			for time.Now().Before(end) {
				start := time.Now()
				mine.Lock()
				mine.since = start
				mine.Unlock()
				mutex := locks.NewMutex(wanted, redsync.WithExpiry(30*time.Second), redsync.WithTries(1<<30))
				if err := mutex.LockContext(context.Background()); err != nil {
					panic(err)
				}
				got := time.Now()
				other := last.Swap(int64(task)) != int64(task)
				_, err := mutex.UnlockContext(context.Background())
				if err != nil {
					panic(err)
				}
				mine.Lock()
				mine.since = time.Time{}
				if got.After(begin) && got.Before(end) {
					mine.waits = append(mine.waits, float64(got.Sub(start).Nanoseconds())/1e3)
					mine.pairs = append(mine.pairs, float64(time.Since(start).Nanoseconds())/1e3)
					if other {
						handOffs.Add(1)
					}
				}
				mine.Unlock()
			}
		}()
	}
	time.Sleep(time.Until(end) + 100*time.Millisecond)

	var waits, pairs []float64
	most, least, starved := 0, 1<<30, 0
	for i := range contenders {
		mine := &contenders[i]
		mine.Lock()
		served := len(mine.waits)
		most, least = max(most, served), min(least, served)
		if served == 0 {
			starved++
		}
		waits = append(waits, mine.waits...)
		pairs = append(pairs, mine.pairs...)
		if !mine.since.IsZero() && mine.since.Before(end) {
			waits = append(waits, float64(end.Sub(mine.since).Nanoseconds())/1e3)
		}
		mine.Unlock()
	}
	slices.Sort(waits)
	slices.Sort(pairs)
	line := map[string]any{"library": "redsync", "scenario": scenario, "tasks": *tasks, "seconds": *seconds}
	if scenario != "contended" {
		line["pairs_per_s"] = float64(len(pairs)) / *seconds
		line["p50_us"] = percentile(pairs, 0.5)
		line["p99_us"] = percentile(pairs, 0.99)
	} else {
		line["hand_offs_per_s"] = float64(handOffs.Load()) / *seconds
		line["wait_p50_ms"] = percentile(waits, 0.5) / 1e3
		line["wait_p99_ms"] = percentile(waits, 0.99) / 1e3
		line["most_served"] = most
		line["least_served"] = least
		line["starved"] = starved
	}
	_ = json.NewEncoder(os.Stdout).Encode(line)
}
