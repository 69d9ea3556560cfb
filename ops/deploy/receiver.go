// A receiver of logferry deliver that takes every chunk once, with the standard library of Go alone.
//
//	go build -o receiver receiver.go
//	./receiver -listen 127.0.0.1:8400 -dir /var/lib/receiver -key /etc/receiver/key
//
// The output is the file lines.ndjson, which grows. The file state.json says how far each partition was taken, and how
// long the output was then: it is the commit. A batch is appended and synced first, then the state replaces the old one
// under its name, and only then the answer is 200. What a crash left behind in the output is cut off at the start.
package main

import (
	"bytes"
	"compress/gzip"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"log"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

const (
	maxBody = 64 << 20
	maxAge  = 300 * time.Second
)

// A Place is how far one partition (or shard) of a subscription was taken: chunks below Reached are in the output.
type Place struct {
	Replay, Epoch, Reached int64
}

// State is the content of state.json.
type State struct {
	OutputBytes int64
	Places      map[string]Place
}

// A Batch is one delivery: its place in the log, and its body.
type Batch struct {
	place               string
	replay, epoch, last int64
	body                []byte
}

// Refused is an answer that is no success.
type Refused struct {
	status int
	why    string
}

func (r Refused) Error() string { return r.why }

// Receiver owns the folder; one request at a time changes it.
type Receiver struct {
	mutex  sync.Mutex
	dir    string
	folder *os.File // its lock lives as long as it is open
	key    []byte
	output *os.File
	state  State
}

// open locks the folder, reads the state, and cuts off what was not committed.
func open(dir, keyFile string) (*Receiver, error) {
	folder, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	r := &Receiver{dir: dir, folder: folder, state: State{Places: map[string]Place{}}}
	if err := syscall.Flock(int(folder.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		return nil, fmt.Errorf("%s is in use by another receiver: %w", dir, err)
	}
	if keyFile != "" {
		key, err := os.ReadFile(keyFile)
		if err != nil {
			return nil, err
		}
		r.key = bytes.TrimSpace(key)
	}
	text, err := os.ReadFile(filepath.Join(dir, "state.json"))
	if err == nil {
		err = json.Unmarshal(text, &r.state)
	} else if errors.Is(err, os.ErrNotExist) {
		err = nil
	}
	if err != nil {
		return nil, err
	}
	r.output, err = os.OpenFile(filepath.Join(dir, "lines.ndjson"), os.O_RDWR|os.O_CREATE, 0o644)
	if err != nil {
		return nil, err
	}
	if info, err := r.output.Stat(); err != nil || info.Size() < r.state.OutputBytes {
		return nil, fmt.Errorf("lines.ndjson is shorter than state.json says, or cannot be read: %v", err)
	}
	if err := r.output.Truncate(r.state.OutputBytes); err != nil {
		return nil, err
	}
	if err := folder.Sync(); err != nil {
		return nil, err
	}
	return r, nil
}

func (r *Receiver) ServeHTTP(w http.ResponseWriter, request *http.Request) {
	batch, err := r.check(request)
	if err == nil {
		err = r.take(batch)
	}
	var refused Refused
	if errors.As(err, &refused) {
		http.Error(w, refused.why, refused.status)
	} else if err != nil {
		// What reached the disk is not known. The next start cuts it off.
		log.Fatal(err)
	}
}

// check reads the batch, and verifies its signature.
func (r *Receiver) check(request *http.Request) (Batch, error) {
	var reader io.Reader = http.MaxBytesReader(nil, request.Body, maxBody)
	switch request.Header.Get("Content-Encoding") {
	case "", "identity":
	case "gzip":
		unpacked, err := gzip.NewReader(reader)
		if err != nil {
			return Batch{}, Refused{http.StatusServiceUnavailable, "the body is cut off, or not gzip"}
		}
		reader = io.LimitReader(unpacked, maxBody+1)
	default:
		return Batch{}, Refused{http.StatusUnsupportedMediaType, "use compression none or gzip"}
	}
	body, err := io.ReadAll(reader)
	var tooLarge *http.MaxBytesError
	if errors.As(err, &tooLarge) || len(body) > maxBody {
		return Batch{}, Refused{http.StatusRequestEntityTooLarge, "the batch is too large: lower max_bytes"}
	}
	if err != nil {
		return Batch{}, Refused{http.StatusServiceUnavailable, "the body did not arrive: " + err.Error()}
	}
	if r.key != nil {
		if err := r.checkSignature(request.Header.Get("X-Logferry-Signature"), body); err != nil {
			return Batch{}, err
		}
	}
	return parse(request.Header, body)
}

func (r *Receiver) checkSignature(text string, body []byte) error {
	stamp, isGood := "", false
	for _, part := range strings.Split(text, ",") {
		name, value, _ := strings.Cut(strings.TrimSpace(part), "=")
		if name == "t" {
			stamp = value
		}
	}
	mac := hmac.New(sha256.New, r.key)
	mac.Write([]byte(stamp + "."))
	mac.Write(body)
	for _, part := range strings.Split(text, ",") {
		name, value, _ := strings.Cut(strings.TrimSpace(part), "=")
		given, err := hex.DecodeString(value)
		isGood = isGood || name == "v1" && err == nil && hmac.Equal(given, mac.Sum(nil))
	}
	seconds, err := strconv.ParseInt(stamp, 10, 64)
	if err != nil || !isGood {
		return Refused{http.StatusUnauthorized, "the signature is missing or wrong"}
	}
	if age := time.Since(time.Unix(seconds, 0)); age > maxAge || age < -maxAge {
		return Refused{http.StatusUnauthorized, "the signature is too old, or the clocks differ"}
	}
	return nil
}

func parse(header http.Header, body []byte) (Batch, error) {
	token := header.Get("X-Logferry-Token")
	cut := strings.LastIndex(token, "/")
	if cut < 0 {
		return Batch{}, Refused{http.StatusBadRequest, "not a delivery of logferry"}
	}
	_, last, _ := strings.Cut(token[cut+1:], "-")
	place := []string{header.Get("X-Logferry-Subscription"), token[:cut], header.Get("X-Logferry-Shard")}
	replay, err1 := strconv.ParseInt(header.Get("X-Logferry-Replay"), 10, 64)
	epoch, err2 := strconv.ParseInt(header.Get("X-Logferry-Epoch"), 10, 64)
	end, err3 := strconv.ParseInt(last, 10, 64)
	if err := errors.Join(err1, err2, err3); err != nil {
		return Batch{}, Refused{http.StatusBadRequest, "not a delivery of logferry: " + err.Error()}
	}
	return Batch{strings.Join(place, " "), replay, epoch, end, body}, nil
}

// take appends the chunks that were not taken before, and commits. An error that is no Refused leaves the disk behind
// in a state that only a new start mends.
func (r *Receiver) take(batch Batch) error {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	place := r.state.Places[batch.place]
	if batch.replay < place.Replay || batch.replay == place.Replay && batch.epoch < place.Epoch {
		return Refused{http.StatusConflict, "a newer worker has replaced this one"}
	}
	if batch.replay > place.Replay {
		place.Reached = 0
	}
	if batch.last < place.Reached {
		return nil // all of it was taken before
	}
	fresh, err := after(batch.body, place.Reached)
	if err != nil {
		return err
	}
	if _, err := r.output.WriteAt(fresh, r.state.OutputBytes); err != nil {
		return err
	}
	if err := r.output.Sync(); err != nil {
		return err
	}
	places := map[string]Place{}
	for name, known := range r.state.Places {
		places[name] = known
	}
	places[batch.place] = Place{batch.replay, batch.epoch, batch.last + 1}
	next := State{r.state.OutputBytes + int64(len(fresh)), places}
	if err := r.commit(next); err != nil {
		return err
	}
	r.state = next
	return nil
}

// after returns the lines of the chunks from an offset on.
func after(body []byte, reached int64) ([]byte, error) {
	var found bytes.Buffer
	for _, line := range bytes.SplitAfter(body, []byte("\n")) {
		if len(line) == 0 {
			continue
		}
		row := struct{ Offset int64 }{}
		if err := json.Unmarshal(line, &row); err != nil {
			return nil, Refused{http.StatusBadRequest, "a line is not JSON: use format ndjson"}
		}
		if row.Offset >= reached {
			found.Write(line)
		}
	}
	return found.Bytes(), nil
}

// commit replaces state.json as a whole.
func (r *Receiver) commit(state State) error {
	text, err := json.Marshal(state)
	if err != nil {
		return err
	}
	file, err := os.Create(filepath.Join(r.dir, "state.new"))
	if err != nil {
		return err
	}
	if _, err := file.Write(text); err != nil {
		return err
	}
	if err := file.Sync(); err != nil {
		return err
	}
	if err := file.Close(); err != nil {
		return err
	}
	if err := os.Rename(file.Name(), filepath.Join(r.dir, "state.json")); err != nil {
		return err
	}
	return r.folder.Sync()
}

func main() {
	listen := flag.String("listen", "127.0.0.1:8400", "host:port")
	dir := flag.String("dir", ".", "the folder of lines.ndjson and state.json")
	key := flag.String("key", "", "a file with the signing key; none: signatures are not checked")
	flag.Parse()
	receiver, err := open(*dir, *key)
	if err != nil {
		log.Fatal(err)
	}
	log.Fatal(http.ListenAndServe(*listen, receiver))
}
