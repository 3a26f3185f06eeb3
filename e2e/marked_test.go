package e2e

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
)

// mark stands in every prompt, answer and key of the tests below, so that it is
// found wherever one of them comes out, if only in part.
const mark = "MARK"

var marked = strings.Repeat(mark, 16)

// markedAnswers are what a replica says that fails in every way there is.
func markedAnswers() map[string]string {
	head := "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
	stream := "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
	chunk := func(s string) string { return fmt.Sprintf("%x\r\n%s\r\n", len(s), s) }
	content := `data: {"id":"c","choices":[{"index":0,"delta":{"content":"` + marked + `"},"finish_reason":null}]}` + "\n\n"
	failed := `{"error":{"message":"` + marked + `","type":"` + marked + `","code":500}}`
	return map[string]string{
		"nothing":               "",
		"no HTTP":               marked + "\r\n\r\n",
		"no version":            "HTTP/" + marked + " 200 OK\r\n\r\n",
		"no status":             "HTTP/1.1 " + marked + "\r\n\r\n",
		"no header":             "HTTP/1.1 200 OK\r\n" + marked + "\r\n\r\n",
		"half a header":         "HTTP/1.1 200 OK\r\nX-A: " + marked,
		"a huge header":         "HTTP/1.1 200 OK\r\nX-A: " + strings.Repeat(marked, 1<<12) + "\r\n\r\n",
		"a length that is none": head + "Content-Length: " + marked + "\r\n\r\n",
		"two lengths":           head + "Content-Length: 5\r\nContent-Length: 64\r\n\r\n" + marked,
		"an unknown framing":    head + "Transfer-Encoding: " + marked + "\r\n\r\n" + marked,
		"an error":              "HTTP/1.1 500 " + marked + "\r\nContent-Length: " + strconv.Itoa(len(failed)) + "\r\n\r\n" + failed,
		"an error cut short":    "HTTP/1.1 503 " + marked + "\r\nContent-Length: 99999\r\n\r\n" + failed,
		"a client's fault":      "HTTP/1.1 400 " + marked + "\r\nContent-Length: " + strconv.Itoa(len(failed)) + "\r\n\r\n" + failed,
		"a redirect": "HTTP/1.1 307 " + marked + "\r\nLocation: http://elsewhere/" + marked + "?" + marked +
			"\r\nContent-Length: 0\r\n\r\n",
		"an answer cut short":          head + "Content-Length: 99999\r\n\r\n" + `{"choices":"` + marked,
		"a long answer cut short":      head + "Content-Length: 9999999\r\n\r\n" + strings.Repeat(marked, 1<<15),
		"an answer without end":        head + "\r\n" + `{"choices":"` + marked,
		"no chunk":                     stream + marked + "\r\n",
		"a stream without content":     stream + chunk(": "+marked+"\n\n"),
		"a stream of an error":         stream + chunk("data: "+failed+"\n\n") + "0\r\n\r\n",
		"a stream of a client's fault": stream + chunk("data: "+strings.Replace(failed, "500", "400", 1)+"\n\n") + "0\r\n\r\n",
		"a stream cut short":           stream + chunk(content),
		"a stream cut in a chunk":      stream + chunk(content) + "ffff\r\n" + content,
		"a stream and no chunk":        stream + chunk(content) + marked + "\r\n" + marked,
		"a stream and an error":        stream + chunk(content) + chunk("data: "+failed+"\n\n") + "0\r\n\r\n",
		"a stream of no JSON":          stream + chunk("data: "+marked+"\n\n") + chunk("data: {\"choices\": "+marked+"\n\n"),
		"an aborted stream": stream + chunk(`data: {"choices":[{"index":0,"delta":{"role":"assistant"},"finish_reason":"abort","x":"`+
			marked+`"}]}`+"\n\n") + "0\r\n\r\n",
		"too much": head + "Content-Length: 2\r\n\r\n{}" + marked,
	}
}

// markedReplica answers as the number in the prompt says.
func markedReplica(t *testing.T, answers []string) (url string) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var serving sync.WaitGroup
	t.Cleanup(func() { l.Close(); serving.Wait() })
	serve := func(c net.Conn) {
		defer c.Close()
		c.SetDeadline(time.Now().Add(time.Minute))
		r, err := http.ReadRequest(bufio.NewReader(c))
		if err != nil {
			return
		}
		body, _ := io.ReadAll(r.Body)
		answer := "{}"
		switch r.URL.Path {
		case "/v1/models":
			answer = `{"data":[{"id":"m","root":"m"}]}`
		case "/metrics":
			answer = "vllm:num_requests_running 0\n"
		case "/v1/chat/completions":
			_, number, _ := bytes.Cut(body, []byte("case "))
			number, _, _ = bytes.Cut(number, []byte(" "))
			if n, err := strconv.Atoi(string(number)); err == nil {
				io.WriteString(c, answers[n])
				return
			}
			answer = wholeAnswer
		}
		fmt.Fprintf(c, "HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", len(answer),
			answer)
	}
	serving.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			serving.Go(func() { serve(c) })
		}
	})
	return "http://" + l.Addr().String()
}

// markedConfigs are configurations with a key in every place where it is a fault.
func markedConfigs(url string, write func(name, text string) string) []string {
	fleet := "backends: [\"" + url + "\"]\n"
	hash := strings.Repeat("a", 64)
	list := []string{
		marked, "- " + marked, "a: *" + marked, "a: !!int " + marked, "backends: [{url: \"" + url + "\", api_key: [" + marked + "]}]",
		"backends: [{url: \"" + url + "\", api_key: {" + marked + ": 1}}]", "backends: [{url: \"" + url + "\", api_key: \"" + marked + "\\n\"}]",
		"backends: [\"http://u:" + marked + "@a\"]", "backends: [\"http://a?api_key=" + marked + "\"]", "backends: [\"http://a#" + marked + "\"]",
		fleet + "keys: " + marked, fleet + "keys: [" + marked + "]", fleet + "keys: {" + marked + ": 1}", fleet + "keys: [{" + marked + ": 1}]",
		fleet + "keys: [{name: a, sha256: " + marked + "}]", fleet + "keys: [{name: \"" + marked + " \", sha256: " + hash + "}]",
		fleet + "keys: [{name: a, sha256: [" + marked + "]}]",
		fleet + "keys: [{name: a, sha256: " + hash + ", expires: " + marked + "}]", fleet + "keys: [{name: a, sha256: " + hash + ", models: " +
			marked + "}]",
		fleet + "admin_token: [" + marked + "]", fleet + "admin_token: {" + marked + ": 1}", fleet + "admin_token: \"" + marked + "\\n\"",
		fleet + "admin_token: " + mark,
	}
	for i, text := range []string{marked, "a " + mark, "a sha256:" + marked, "a " + marked + " " + marked, "a " + marked + "\nb " + marked,
		marked + "\" " + marked, "\x00" + marked} {
		list = append(list, fleet+"keys_file: "+write(fmt.Sprint("bad-", i), text))
	}
	return list
}
