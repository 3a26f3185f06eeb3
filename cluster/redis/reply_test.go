package redis

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	goredis "github.com/redis/go-redis/v9"
)

// serveReplies starts a server that replies to HELLO with hello, and to any other command with reply. It returns the address.
func serveReplies(t *testing.T, hello, reply string) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var running sync.WaitGroup
	running.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			running.Go(func() {
				defer conn.Close()
				for r := bufio.NewReader(conn); ; {
					command, err := readCommand(r)
					if err != nil {
						return
					}
					text := reply
					if strings.EqualFold(command[0], "HELLO") {
						text = hello
					}
					if _, err := io.WriteString(conn, text); err != nil {
						return
					}
				}
			})
		}
	})
	t.Cleanup(func() {
		l.Close()
		running.Wait()
	})
	return l.Addr().String()
}

// readCommand returns the words of a command.
func readCommand(r *bufio.Reader) (words []string, err error) {
	var n, size int
	if _, err := fmt.Fscanf(r, "*%d\r\n", &n); err != nil {
		return nil, err
	}
	for range n {
		if _, err := fmt.Fscanf(r, "$%d\r\n", &size); err != nil {
			return nil, err
		}
		b := make([]byte, size+2)
		if _, err := io.ReadFull(r, b); err != nil {
			return nil, err
		}
		words = append(words, string(b[:size]))
	}
	return words, nil
}

func newClient(t *testing.T, o Options) *Client {
	t.Helper()
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	if o.Mode == "" {
		o.Mode = ModeSingle
	}
	c, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c
}

const helloReply = "*2\r\n$5\r\nproto\r\n:2\r\n"

// A reply that announces more than there can be, or is nested deep, took all memory or all stack.
func TestRefusedReplies(t *testing.T) {
	const huge = 99_999_999_999
	for _, c := range []struct{ name, reply, want string }{
		{"string", fmt.Sprintf("$%d\r\nx", huge), "announces a string of 99999999999 bytes"},
		{"verbatim string", fmt.Sprintf("=%d\r\ntxt:", huge), "announces a string"},
		{"error", fmt.Sprintf("!%d\r\nERR", huge), "announces a string"},
		{"array", fmt.Sprintf("*%d\r\n:1\r\n", huge), "announces 99999999999 elements"},
		{"map", fmt.Sprintf("%%%d\r\n:1\r\n", huge), "announces 99999999999 elements"},
		{"map beyond an int", fmt.Sprintf("%%%d\r\n:1\r\n", uint64(1)<<62), "a line of it is too long"},
		{"set", fmt.Sprintf("~%d\r\n:1\r\n", huge), "announces 99999999999 elements"},
		{"push", fmt.Sprintf(">%d\r\n:1\r\n", huge), "announces 99999999999 elements"},
		{"nested", strings.Repeat("*1\r\n", 30_000_000), "nested more than 16 deep"},
		{"nested maps", strings.Repeat("%1\r\n+k\r\n", 1000), "nested more than 16 deep"},
		{"attributes", strings.Repeat("|1\r\n+k\r\n+v\r\n", 1000), `'|' begins no value`},
		{"streamed string", "$?\r\n;4\r\nword\r\n", "is not a length"},
		{"long line", "+" + strings.Repeat("x", maxLineBytes+10), "a line of it is too long"},
		{"another protocol", "HTTP/1.1 400 Bad Request\r\n\r\n", `'H' begins no value`},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			for _, protocol := range []string{"2", "3"} {
				client := newClient(t, Options{URL: "redis://" + serveReplies(t, helloReply, c.reply) + "?read_timeout=1m&dial_timeout=1m&protocol=" +
					protocol})
				_, err := client.ReadHash(t.Context(), "k", 10)
				var refused *ReplyError
				if !errors.As(err, &refused) || !strings.Contains(err.Error(), c.want) {
					t.Errorf("protocol %s: %v, want a ReplyError with %q", protocol, err, c.want)
				}
			}
		})
	}
}

// What is refused is not allocated.
func TestRefusedRepliesTakeNoMemory(t *testing.T) {
	client := newClient(t, Options{URL: "redis://" + serveReplies(t, helloReply, "*2000000\r\n") + "?read_timeout=1m&dial_timeout=1m"})
	client.ReadHash(t.Context(), "k", 10)
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	for range 20 {
		if _, err := client.ReadHash(t.Context(), "k", 10); err == nil {
			t.Fatal("the reply was accepted")
		}
	}
	runtime.ReadMemStats(&after)
	if n := after.TotalAlloc - before.TotalAlloc; n > 20<<20 {
		t.Errorf("%d bytes were allocated", n)
	}
}

// The reply of a sentinel is checked as well.
func TestRefusedReplyOfSentinel(t *testing.T) {
	for _, reply := range []string{"*99999999999\r\n", strings.Repeat("*1\r\n", 1_000_000)} {
		client := newClient(t, Options{Mode: ModeSentinel, URL: "redis://" + serveReplies(t, helloReply, reply) +
			"?master_name=m&read_timeout=1m&dial_timeout=1m"})
		_, err := client.ReadHash(t.Context(), "k", 10)
		if err == nil || !strings.Contains(err.Error(), "reply refused") {
			t.Errorf("%v", err)
		}
	}
}

// A sentinel that does not know the master has replied, and yet nothing was read or written.
func TestSentinelWithoutMaster(t *testing.T) {
	for name, reply := range map[string]string{
		"null": "*-1\r\n", "one word": "*1\r\n$8\r\nsentinel\r\n", // in place of an address and a port
	} {
		client := newClient(t, Options{Mode: ModeSentinel, URL: "redis://" + serveReplies(t, helloReply, reply) + "?master_name=m"})
		entries, areMore, err := client.ReadStream(t.Context(), "k", "0", "f", 1, time.Millisecond)
		if err == nil {
			t.Errorf("%s: read %v, %v", name, entries, areMore)
		}
		if isWritten, err := client.WriteValue(t.Context(), "k", nil, time.Minute, true); err == nil {
			t.Errorf("%s: written: %v", name, isWritten)
		} else if name == "null" && !errors.Is(err, errNoMaster) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// A reader repeats at once what ended without messages, which must have taken its time.
func TestReadEndsEarly(t *testing.T) {
	client := newClient(t, Options{URL: "redis://" + serveReplies(t, helloReply, "*-1\r\n")})
	if entries, _, err := client.ReadStream(t.Context(), "k", "0", "f", 1, time.Minute); err != errEarlyNull {
		t.Errorf("read %v, error %v", entries, err)
	}
}

// A node of a Redis Cluster may not know its own address, and names itself by a port.
func TestAddressWithoutHost(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.2:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	d := newDialer(&options{dialTimeout: time.Minute, hosts: []string{"127.0.0.2"}})
	defer d.closeAll()
	_, port, _ := net.SplitHostPort(l.Addr().String())
	conn, err := d.dial(t.Context(), "tcp", ":"+port)
	if err != nil {
		t.Fatal(err)
	}
	conn.Close()
}

// Of sentinels without a majority and others that reply with an error, one of the former is believed.
func TestNoQuorumBesideErrors(t *testing.T) {
	c, s := &Client{log: func(error, string) {}}, &session{dialer: newDialer(&options{}), library: goredis.NewClient(&goredis.Options{})}
	c.current = s
	if err := c.record(s, errors.Join(errNoQuorum, goredis.Nil), false); !errors.Is(err, errNoQuorum) {
		t.Error(err)
	}
	if c.current != nil || !time.Now().Before(c.ignoresQuorumUntil) {
		t.Errorf("the session was not replaced, or the quorum is not ignored: until %v", c.ignoresQuorumUntil)
	}
	c.running.Wait()
}

func TestReplyChecker(t *testing.T) {
	longest := "$" + strconv.Itoa(maxStringBytes) + "\r\n" + strings.Repeat("x", maxStringBytes) + "\r\n"
	for _, c := range []struct {
		name, replies, want string // in the error; "": none
	}{
		{"values", "+OK\r\n-ERR no\r\n:1\r\n$0\r\n\r\n$-1\r\n*-1\r\n*0\r\n_\r\n,1.5\r\n#t\r\n(123\r\n=5\r\ntxt:a\r\n" +
			"!3\r\nERR\r\n%0\r\n~1\r\n:1\r\n>1\r\n+x\r\n", ""},
		{"a string that looks like a length", "$14\r\n*99999999999\r\n\r\n+OK\r\n", ""},
		{"nested as deep as allowed", strings.Repeat("*1\r\n", maxReplyDepth) + ":1\r\n+OK\r\n", ""},
		{"nested deeper", strings.Repeat("*1\r\n", maxReplyDepth+1), "nested"},
		{"empty and null at the end of aggregates", "*2\r\n*0\r\n*1\r\n*-1\r\n*2\r\n%1\r\n+k\r\n$-1\r\n~0\r\n+OK\r\n", ""},
		{"as many elements as allowed",
			fmt.Sprintf("*%d\r\n", maxReplyElements-1) + strings.Repeat("*0\r\n", maxReplyElements-2) + "*1\r\n:1\r\n+OK\r\n", ""},
		{"elements of several aggregates", fmt.Sprintf("*2\r\n*%d\r\n", maxReplyElements-1), "announces"},
		{"half of a map", fmt.Sprintf("%%%d\r\n", maxReplyElements/2+1), "announces"},
		{"replies in turn", strings.Repeat(longest, 2*maxReplyBytes/maxStringBytes), ""},
		{"one reply of as many bytes", "*64\r\n" + strings.Repeat(longest, maxReplyBytes/maxStringBytes), "more than"},
		{"longer string", "$" + strconv.Itoa(maxStringBytes+1) + "\r\n", "announces a string"},
		{"no carriage return", "$1\nx\r\n", "is not a length"},
		{"sign", "$+1\r\nx\r\n", "is not a length"},
		{"negative", "$-2\r\n", "is not a length"},
		{"no digits", "*\r\n", "is not a length"},
		{"many digits", "*" + strings.Repeat("0", 100), "too long"},
	} {
		t.Run(c.name, func(t *testing.T) {
			for _, part := range []int{1 << 30, 4096, 7, 1} {
				if part < 4096 && len(c.replies) > 1<<20 {
					continue
				}
				err := checkInParts(&replyChecker{}, []byte(c.replies), func(int) int { return part })
				if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
					t.Errorf("parts of %d bytes: %v, want an error with %q", part, err, c.want)
				}
			}
		})
	}
}

// checkInParts checks a reply in parts, whose sizes size returns.
func checkInParts(c *replyChecker, b []byte, size func(i int) int) error {
	for i := 0; len(b) > 0; i++ {
		n := min(max(size(i), 1), len(b))
		if err := c.check(b[:n]); err != nil {
			return err
		}
		b = b[n:]
	}
	return nil
}

// FuzzReplyChecker asserts that the verdict does not depend on how the bytes arrive, and that what is accepted is within the
// bounds, by a parser that has the whole reply.
func FuzzReplyChecker(f *testing.F) {
	f.Add([]byte("*2\r\n$3\r\nkey\r\n%1\r\n+a\r\n:1\r\n"), []byte{1, 2, 3})
	f.Add([]byte("*1\r\n*2\r\n$6\r\nstream\r\n*1\r\n*2\r\n$3\r\n1-0\r\n*2\r\n$1\r\nm\r\n$4\r\ndata\r\n"), []byte{5})
	f.Add([]byte("*99999999999\r\n"), []byte{0})
	f.Add([]byte("=7\r\ntxt:abc\r\n_\r\n#f\r\n(1\r\n>1\r\n+x\r\n~1\r\n,1\r\n!1\r\nE\r\n-x\r\n$-1\r\n"), []byte{9, 1})
	f.Fuzz(func(t *testing.T, b, parts []byte) {
		whole, split := &replyChecker{}, &replyChecker{}
		err := whole.check(b)
		again := checkInParts(split, b, func(i int) int {
			if len(parts) == 0 {
				return 1
			}
			return int(parts[i%len(parts)])
		})
		if (err == nil) != (again == nil) || err != nil && err.Error() != again.Error() {
			t.Fatalf("%q: %v, in parts %v", b, err, again)
		}
		isWhole, expected := true, false
		for rest := string(b); len(rest) > 0 && isWhole && !expected; {
			left := maxReplyElements
			rest, isWhole, expected = skipValue(rest, 0, &left)
		}
		if (err != nil) != expected {
			t.Fatalf("%q: %v, want an error: %v", b, err, expected)
		}
		if len(whole.open) > maxReplyDepth || whole.elements > maxReplyElements || cap(whole.text) > maxFirstStringBytes+2 {
			t.Fatalf("%q: state %+v", b, whole)
		}
	})
}

// skipValue returns what follows the first value of b. isWhole: the value has ended. isRefused: it is beyond the bounds, or
// invalid, as far as b has it.
func skipValue(b string, depth int, left *int) (rest string, isWhole, isRefused bool) {
	if len(b) == 0 {
		return "", false, false
	}
	if !strings.ContainsRune("+-:_,#($=!*~>%", rune(b[0])) {
		return "", false, true
	}
	most, isLine := maxLengthBytes, strings.ContainsRune("+-:_,#(", rune(b[0]))
	if isLine {
		most = maxLineBytes
	}
	line, rest, hasEnd := strings.Cut(b[1:], "\n")
	switch {
	case hasEnd && len(line)+1 > most || !hasEnd && len(line) > most:
		return "", false, true
	case !hasEnd:
		return "", false, false
	case isLine:
		return rest, true, false
	}
	digits, hasReturn := strings.CutSuffix(line, "\r")
	n, err := strconv.Atoi(digits)
	switch {
	case !hasReturn || err != nil || n < -1 || strings.HasPrefix(digits, "+"):
		return "", false, true
	case n == -1:
		return rest, true, false
	case strings.ContainsRune("$=!", rune(b[0])):
		if n > maxStringBytes {
			return "", false, true
		}
		if len(rest) < n+2 {
			return "", false, false
		}
		return rest[n+2:], true, false
	case b[0] == '%' && n > *left/2 || n > *left:
		return "", false, true
	}
	if b[0] == '%' {
		n *= 2
	}
	*left -= n
	if n > 0 && depth == maxReplyDepth {
		return "", false, true
	}
	b = rest
	for range n {
		if b, isWhole, isRefused = skipValue(b, depth+1, left); !isWhole {
			return "", false, isRefused
		}
	}
	return b, true, false
}

// A command ends when its context is cancelled, also in a read.
func TestCancelledCommand(t *testing.T) {
	client := newClient(t, Options{URL: "redis://" + serveReplies(t, helloReply, "") + "?read_timeout=1m&dial_timeout=1m"}) // no reply
	ctx, cancel := context.WithCancel(t.Context())
	time.AfterFunc(50*time.Millisecond, cancel)
	if _, _, err := client.ReadStream(ctx, "k", "0", "m", 1, time.Minute); !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
	ctx, cancel = context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, _, err := client.ReadStream(ctx, "k", "0", "m", 1, time.Minute); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("%v", err)
	}
}
